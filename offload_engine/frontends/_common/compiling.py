# SPDX-License-Identifier: Apache-2.0
"""Keeps torch.compile away from functions that it must not trace and code that it must not run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

import torch

from offload_engine._compat import torch_private
from offload_engine.errors import OffloadError

_Function = TypeVar("_Function", bound=Callable[..., object])


def untraced(function: _Function) -> _Function:
    """Return `function` excluded from torch.compile, which also compiles frames that run between its graphs."""
    # torch.compiler imports the compiler, which takes seconds, so do not use it unless compile is in use.
    return torch.compiler.disable(function) if is_compiler_loaded() else function


def is_compiler_loaded() -> bool:
    """Return whether the compiler has been imported; before that, `untraced` has no effect."""
    return "torch._dynamo" in sys.modules


def refuse_when_compiled(what: str) -> None:
    """Raise an error in code that torch.compile runs: a graph break here would change the last bits.

    Args:
        what: subject of the message.

    Raises:
        OffloadError: in such code. Raised during tracing, it makes the compiler run the caller eagerly, and that run
            raises it to the user.
    """
    if is_compiled():
        raise OffloadError(
            f"{what} is inside a function that torch.compile compiles. Put it around the call of the compiled "
            "function, or compile the layers inside it, or mark the function around it with torch.compiler.disable."
        )


def is_compiled() -> bool:
    """Return whether torch.compile traces this code, or runs it eagerly and compiles only the functions it calls."""
    # No public function detects the latter.
    return torch.compiler.is_compiling() or callable(torch_private.eval_frame_callback())
