# SPDX-License-Identifier: Apache-2.0
"""Ends a run with one line that says what to change, shown once and last, in the words of the command line."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from megatron_patches._flags import SETTINGS
from megatron_patches._model.modules import MODULES

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_OTHERS_WAIT_S = 5.0  # torchrun ends them long before, because rank 0 of the host has reported
_NOTE = re.compile(r" \('\w+' stands for '\w+'(; '\w+' stands for '\w+')*\)")
_OTHERS = ("recompute_modules", "recompute_granularity", "recompute_method")
_ELSEWHERE = {
    "--fine-grained-activation-offloading": "--offload-activation, or --offload-engine to run this recipe as it is",
    "--fine-grained-offloading-max-inflight-offloads": "--offload-max-inflight-bytes",
    "--activation-offload-fraction": "--offload-fraction",
    "--min-offloaded-tensor-size": "--offload-min-tensor-bytes",
    "--delta-offload-bytes-across-pp-ranks": "--offload-rank-delta-bytes",
    "--cpu-offloading": "--offload-activation",
    "--cpu-offloading-num-layers": "--offload-num-layers",
    "--num-layers-per-virtual-pipeline-stage": "--num-virtual-stages-per-pipeline-rank",
    "--gpu-budget": "--offload-gpu-budget",
}
"""Flags of other tools, and their names here."""


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports mistakes in one line without the usage, with a hint for unknown flags."""

    def error(self, message: str) -> NoReturn:
        """End the run with `message`."""
        end_run(self.prog, message, 2)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse the arguments; end the run if one is unknown."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            hints = [hint for flag in unknown if flag.startswith("-") and (hint := self._hint(flag.partition("=")[0]))]
            hint = f" ({'; '.join(hints)})" if hints else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found

    def _hint(self, flag: str) -> str:
        known, written = self._option_string_actions, flag.replace("_", "-")
        if written in known:
            return f"it is written {written}"
        if written in _ELSEWHERE:
            return f"here {flag} is {_ELSEWHERE[written]}"
        nearest = get_close_matches(written, known, n=1)
        return f"did you mean {nearest[0]}?" if nearest else ""


def end_run(program: str, message: str, status: int = 1, words: Sequence[str] | None = None) -> NoReturn:
    """End this process because of a mistake of the user, with one line that all ranks together print once.

    Under torchrun the line goes into the report that torchrun prints last. The other ranks of the host stay silent and
    are ended by torchrun; a rank with a different error reports it after five seconds.

    Args:
        program: start of the line.
        message: names settings as fields of a configuration; the line names them as flags, and modules as they were
            typed.
        status: exit status.
        words: words of the command line; None: those of `sys.argv`.

    Raises:
        SystemExit: always.
    """
    line = f"{program}: error: {as_typed(message, sys.argv if words is None else words)}"
    file = os.environ.get(_ERROR_FILE)
    if not file:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"{line}\n")
        sys.exit(status)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_OTHERS_WAIT_S)
    with open(file, "w") as report:
        json.dump({"message": line, "timestamp": int(time.time())}, report)
    sys.exit(status)


def as_typed(message: str, words: Iterable[str]) -> str:
    """Return a message in the words of a command line: flags for settings, and modules as they were typed."""
    typed = {part for word in words for part in word.split(",")}
    message = _NOTE.sub("", message)
    for row in MODULES:
        alias = next((alias for alias in row.aliases if alias in typed), None)
        if alias is not None and row.name not in typed:
            message = message.replace(f"'{row.name}'", f"'{alias}'")
    for field, flag in _flags().items():
        message = re.sub(rf"(?<![-\w(]){field}=(True|False)\b", flag, message)
        message = re.sub(rf"(?<![-\w(./]){field}=", f"{flag} ", message)
        message = re.sub(rf"(?<![-\w(./]){field}\b(?![(/]|\.\w)", flag, message)
        message = message.replace(f"{flag} ({flag})", flag)
    return message


def _flags() -> dict[str, str]:
    own = {setting.name: setting.flag for setting in SETTINGS} | {"offload_modules": "--offload-modules"}
    bare = {
        name.removeprefix("offload_"): flag
        for name, flag in own.items()
        if name.endswith(("_bytes", "_policy", "_budget"))
    }
    others = {name: f"--{name.replace('_', '-')}" for name in _OTHERS}
    return own | bare | others
