# SPDX-License-Identifier: Apache-2.0
"""One trial: an interrupt somewhere in a step or in close(), and what has to be true behind it."""

from __future__ import annotations

import contextlib
import contextvars
import faulthandler
import gc
import inspect
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from offload_engine import OffloadEngine
from offload_engine._compat import torch_private
from offload_engine._devices import CpuDevice
from offload_engine._host.try_lock import run_if_free
from offload_engine._saved.handles import PackedTensor
from offload_engine._saved.storage import RETIRED
from tests.adversarial import AdversarialDevice
from tests.interrupts.inject import AtByteCode, Injector, Timer
from tests.interrupts.jobs import DEVICES, JOBS, Job

TIMEOUT_S = 60
REPEATABLE = ("byte code", "byte code", "destructor", "close at byte code")
"""Places of an interrupt that a seed determines; timers come when they come."""
PLACES = ("timer", "timer", "timer", "byte code", "byte code", "destructor", "close by timer", "close at byte code")


HOOKS_LEFT = "torch's hooks are left"
"""On autograd's stack: the interrupt came between the push of hooks by torch's checkpoint and the `with` that would pop
them. Nothing was left but these and what they had packed, and the next step was right."""
EXPECTED = ("raised", "raised by the next step", "came too late", "dropped", HOOKS_LEFT)


class _HooksLeft(Exception):
    """Nothing but hooks of torch is left behind an interrupt."""


class _Swallowed(NamedTuple):
    """What a destructor has raised."""

    text: str
    is_of_step: bool  # of an object of the engine that belongs to a step which has not been abandoned


class Trial(NamedTuple):
    """What came of an interrupt."""

    seed: int
    front_end: str
    device: str
    place: str  # one of `PLACES`
    outcome: str  # "raised", "raised by the next step", "came too late", "dropped", or what was wrong


class Trials:
    """Runs trials in this process. Jobs are kept from one to the next: what an interrupt has torn may show later.

    Args:
        places: to draw from.
    """

    def __init__(self, places: Sequence[str] = PLACES) -> None:
        self._places = places
        self._jobs: dict[tuple[str, str], Job] = {}
        self._expected: dict[str, list[torch.Tensor]] = {}
        self._sizes: dict[tuple[str, str, str], float] = {}
        self._context = contextvars.copy_context()  # an interrupt may leave a checkpoint in force in it
        self.swallowed: list[_Swallowed] = []

    def run(self, seed: int) -> Trial:
        """Run the trial of this seed; a hang ends the process with the tracebacks of all threads."""
        rng = random.Random(seed)
        front_end, device, place = rng.choice(list(JOBS)), rng.choice(list(DEVICES)), rng.choice(self._places)
        faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)
        try:
            with _noting_what_destructors_raise(self.swallowed):
                outcome = self._context.run(self._check, front_end, device, place, rng)
        except _HooksLeft:
            outcome = HOOKS_LEFT
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
            self._jobs.pop((front_end, device), None)
        finally:
            faulthandler.cancel_dump_traceback_later()
        return Trial(seed, front_end, device, place, outcome)

    def _check(self, front_end: str, device: str, place: str, rng: random.Random) -> str:
        job = self._jobs.get((front_end, device)) or self._new_job(front_end, device)
        action = job.close if place.startswith("close") else job.step
        injector = self._injector(job, front_end, device, place, rng)
        self.swallowed.clear()
        has_come = injector.deliver_in(action)
        where = list(self.swallowed)
        if place.startswith("close"):
            del self._jobs[front_end, device]
            _check_closed(job)
            return _outcome(has_come, injector, where)
        for _ in range(rng.randrange(3)):  # a second Ctrl-C, or a third, comes while the first is dealt with
            AtByteCode(rng.randrange(1, 2000)).deliver_in(job.recover)
        job.recover()
        has_come_later = self._steps_are_right(job, front_end, expects_interrupt=injector.has_fired and not has_come)
        return "raised by the next step" if has_come_later else _outcome(has_come, injector, where)

    def _steps_are_right(self, job: Job, front_end: str, expects_interrupt: bool) -> bool:
        """Check the next step; return whether it raised the interrupt of the last one.

        Raises:
            _HooksLeft: if hooks of torch were left, which would hold what they have packed; they are popped first.
        """
        are_hooks_left = _pop_hooks_of_torch()
        try:
            got, has_come = job.step(), False
        except KeyboardInterrupt:
            assert expects_interrupt, "the next step was interrupted once more"
            job.recover()
            are_hooks_left |= _pop_hooks_of_torch()
            got, has_come = job.step(), True
        expected = self._expected[front_end]
        assert len(got) == len(expected) and all(map(torch.equal, got, expected)), "the next step differs"
        del got
        are_hooks_left |= _pop_hooks_of_torch()
        _check_hooks()
        try:
            _check_nothing_left(job)
        except AssertionError:  # perhaps in a cycle with the exception: the collector is slow, so not each time
            gc.collect()
            _check_nothing_left(job)
        if are_hooks_left:
            raise _HooksLeft
        return has_come

    def interrupt(self, front_end: str, number: int, function: str) -> bool:
        """Interrupt a step at a byte code of `function`, check the next one; return whether there are as many."""
        job = self._jobs.get((front_end, "cpu")) or self._new_job(front_end, "cpu")
        injector = AtByteCode(number, function)
        has_come = injector.deliver_in(job.step)
        job.recover()
        self._steps_are_right(job, front_end, expects_interrupt=injector.has_fired and not has_come)
        return injector.has_fired

    def _new_job(self, front_end: str, device: str) -> Job:
        if front_end not in self._expected:
            self._expected[front_end] = JOBS[front_end](None).step()
        job = self._jobs[front_end, device] = JOBS[front_end](DEVICES[device]())
        job.step()
        self._steps_are_right(job, front_end, False)
        return job

    def _injector(self, job: Job, front_end: str, device: str, place: str, rng: random.Random) -> Injector:
        if place.endswith("timer"):
            return Timer(rng.uniform(0, self._size(job, front_end, device, place)))
        function = "__del__" if place == "destructor" else ""
        return AtByteCode(rng.randint(1, max(1, int(self._size(job, front_end, device, place)))), function)

    def _size(self, job: Job, front_end: str, device: str, place: str) -> float:
        """Return how long, in seconds or byte codes, what is interrupted takes."""
        if place == "close by timer":
            return 1e-3
        if place == "close at byte code":
            return 3000
        key = front_end, device, place
        if key not in self._sizes:
            counter = AtByteCode(0, "__del__" if place == "destructor" else "")
            if place == "timer":
                self._sizes[key] = min(_seconds(job.step) for _ in range(3))
            else:
                counter.deliver_in(job.step)
                self._sizes[key] = counter.num_seen
        return self._sizes[key]


def _outcome(has_come: bool, injector: Injector, swallowed: list[_Swallowed]) -> str:
    if has_come:
        return "raised"
    if not injector.has_fired:
        return "came too late"
    if swallowed and (isinstance(injector, AtByteCode) or not any(one.is_of_step for one in swallowed)):
        return "dropped"  # by Python: at the end of a destructor, where a signal never comes, or in one of no step
    return f"lost: {', '.join(one.text for one in swallowed) or 'without a trace'}"


def _check_nothing_left(job: Job) -> None:
    engine = job.engine
    assert engine is not None
    assert engine.stats.copied_out_bytes > 0, "nothing moves any more"
    snapshot = engine.snapshot()
    assert snapshot[:4] == (0, 0, 0, 0) and not snapshot.leaving and not snapshot.num_live, f"left: {snapshot}"
    assert engine.pool.num_leases == 0 == engine.pool.lent_bytes, f"{engine.pool.num_leases} leases are left"
    assert not engine.is_in_iteration, "the iteration never ends"
    _check_locks(engine)
    if isinstance(engine.device, AdversarialDevice):
        assert not engine.device.hazards, engine.device.hazards[:3]


def _pop_hooks_of_torch() -> bool:
    """Pop the innermost hooks while they are torch's: the engine pops its own only. Return whether there were any."""
    were_any = False
    while (top := torch_private.innermost_hooks(True)) is not None:
        if inspect.unwrap(top[1]).__module__.startswith("offload_engine"):
            break
        torch_private.pop_hooks()
        were_any = True
    return were_any


def _check_hooks() -> None:
    is_left = torch_private.innermost_hooks(True) is not None
    while torch_private.innermost_hooks(True) is not None:
        torch_private.pop_hooks()  # or they would be those of the next trial as well
    assert not is_left, "hooks are left"


def _check_closed(job: Job) -> None:
    job.close()
    engine = job.engine
    assert engine is not None and engine.pool.slab_bytes_total == 0 and engine.pool.num_leases == 0
    if isinstance(engine.device, AdversarialDevice):
        assert engine.device.is_closed and not engine.device.hazards and engine.device.host_bytes == 0
    else:
        assert isinstance(engine.device, CpuDevice)
        device_threads = [stream._thread for stream in engine.device._streams if stream._thread is not None]
        assert not device_threads, "a copy thread runs on"


def _check_locks(engine: OffloadEngine) -> None:
    for lock in (engine._store._lock, engine.pool._lock):
        assert not lock._is_owned() and run_if_free(lock, lambda: None), "a lock stays taken"


def _is_of_step(args: Any) -> bool:
    """Return whether the engine has to notice what Python drops there."""
    traceback = args.exc_traceback
    while traceback is not None:
        handle = traceback.tb_frame.f_locals.get("self")
        if isinstance(handle, PackedTensor):  # a graph of an earlier interrupt may be freed in any later step
            return handle.storage.residency is not RETIRED
        traceback = traceback.tb_next
    return str(getattr(args.object, "__module__", "")).startswith("offload_engine")


def _seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


@contextlib.contextmanager
def _noting_what_destructors_raise(found: list[_Swallowed]) -> Iterator[None]:
    before = sys.unraisablehook

    def note(args: Any) -> None:
        traceback = args.exc_traceback
        while traceback is not None and traceback.tb_next is not None:
            traceback = traceback.tb_next
        name = getattr(args.object, "__qualname__", repr(args.object))
        text = f"{args.exc_type.__name__} in {name}" + (f":{traceback.tb_lineno}" if traceback else "")
        found.append(_Swallowed(text, _is_of_step(args)))

    sys.unraisablehook = note
    try:
        yield
    finally:
        sys.unraisablehook = before
