# SPDX-License-Identifier: Apache-2.0
"""Ways to deliver a KeyboardInterrupt: by a real timer, or at the nth byte code of the engine."""

from __future__ import annotations

import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import offload_engine

PACKAGE = str(Path(offload_engine.__file__).parent)
# And its finalizers: a block that it does not forget seems released.
_DEVICE_OF_TESTS = ("adversarial.py", "weakref.py")
_AGAIN_S = 2e-5


class Injector(ABC):
    """Delivers at most one KeyboardInterrupt between `arm` and `disarm`.

    Attributes:
        has_fired: it was delivered, wherever it went.
    """

    has_fired = False

    def deliver_in(self, action: Callable[[], object]) -> bool:
        """Run `action`; return whether the interrupt came out of it."""
        try:
            try:
                self.arm()
                action()
            finally:
                self.disarm()
        except KeyboardInterrupt:
            self.disarm()
            return True
        return False

    @abstractmethod
    def arm(self) -> None: ...

    @abstractmethod
    def disarm(self) -> None: ...


class Timer(Injector):
    """A signal after some seconds, at whatever the main thread runs then; never in the code of the tests' device."""

    def __init__(self, seconds: float) -> None:
        self._seconds = max(seconds, 1e-6)
        self._before: Any = None
        self._is_armed = False

    def arm(self) -> None:
        self._before = signal.signal(signal.SIGALRM, self._handle)
        self._is_armed = True
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def disarm(self) -> None:
        self._is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self._before is not None:
            signal.signal(signal.SIGALRM, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_armed:
            return
        if _is_inside(frame, lambda code: code.co_filename.endswith(_DEVICE_OF_TESTS)):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
            return
        self._is_armed = False
        self.has_fired = True
        raise KeyboardInterrupt


class AtByteCode(Injector):
    """An exception in front of the nth byte code of the engine, so also where Python itself would deliver no signal.

    Args:
        number: 1 is the first; 0 counts only.
        function: count only byte codes that run inside a function of this name; empty: all.

    Attributes:
        num_seen: byte codes so far.
    """

    def __init__(self, number: int, function: str = "") -> None:
        self.num_seen = 0
        self._number = number
        self._function = function

    def arm(self) -> None:
        sys.settrace(self._enter)

    def disarm(self) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if self._function and not _is_inside(frame, lambda code: code.co_name == self._function):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            self.num_seen += 1
            if self.num_seen == self._number:
                sys.settrace(None)
                self.has_fired = True
                raise KeyboardInterrupt
        return self._step


def _is_inside(frame: FrameType | None, is_wanted: Callable[[CodeType], bool]) -> bool:
    while frame is not None and not is_wanted(frame.f_code):
        frame = frame.f_back
    return frame is not None
