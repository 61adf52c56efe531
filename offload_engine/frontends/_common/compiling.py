"""Where the front-ends meet torch.compile: what it must not trace, and where it cannot go."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

import torch

from offload_engine._compat import torch_private
from offload_engine.errors import OffloadError

_Function = TypeVar("_Function", bound=Callable[..., object])


def untraced(function: _Function) -> _Function:
    """`function` as torch.compile leaves it alone: else it would compile what runs between its own graphs too."""
    # Asking torch.compiler imports the compiler, which takes seconds: not where nobody uses it.
    return torch.compiler.disable(function) if is_compiler_loaded() else function


def is_compiler_loaded() -> bool:
    """True once anybody has compiled anything; before, `untraced` has no effect."""
    return "torch._dynamo" in sys.modules


def refuse_when_compiled(what: str) -> None:
    """Raise in code that torch.compile runs: it would cut its graph in two here, which changes the last bits.

    Args:
        what: begins the message.

    Raises:
        OffloadError: there. The tracer takes it for a reason to run the caller as it is; then it reaches the user.
    """
    if is_compiled():
        raise OffloadError(
            f"{what} is inside a function that torch.compile compiles. Put it around the call of the compiled "
            "function, or compile the layers inside it, or mark the function around it with torch.compiler.disable."
        )


def is_compiled() -> bool:
    """True in code that torch.compile traces, or has given up tracing but for the functions called there."""
    # No public function tells the latter.
    return torch.compiler.is_compiling() or callable(torch_private.eval_frame_callback())
