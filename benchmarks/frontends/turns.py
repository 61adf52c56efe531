"""One turn of one contender: warm-up, timed steps, and what it held; bounded in time and host memory."""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from benchmarks.gpu.gradients import Fingerprint, compare, fingerprint
from benchmarks.gpu.leftovers import Held, leftovers
from benchmarks.gpu.measure import Gauge, MemoryTimeline, record_memory

from .contenders import Attach
from .gauges import HostUse
from .watch import Stopped, Watch
from .workload import Attached, Timing, Workload

REFERENCE = "none"
_CROWD_BYTES = 1 << 30  # less of the host's memory, held by others, is not worth a word


@dataclass(frozen=True)
class Counts:
    """How many steps a turn has."""

    warmup: int
    iters: int

    @property
    def total(self) -> int:
        return self.warmup + self.iters


@dataclass
class _Progress:
    """How far a turn came."""

    seconds_of_steps: list[float] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    fingerprint: Fingerprint | None = None
    failure: str | None = None


class Bench:
    """Runs turns on one model, and remembers the gradients of each contender.

    Args:
        workload: the model.
        gauge: of memory.
        counts: of steps.
        host_bytes: how much host memory a contender may take.
        on_step: told what comes next, before each step; for the progress bar.
    """

    def __init__(
        self, workload: Workload, gauge: Gauge, counts: Counts, host_bytes: int, on_step: Callable[[str], None]
    ) -> None:
        self.workload = workload
        self._gauge = gauge
        self._counts = counts
        self._host_bytes = host_bytes
        self.on_step = on_step
        self._reference: Fingerprint | None = None
        self.timelines: list[MemoryTimeline] = []
        self._held_first: Held | None = None
        self._host_use = HostUse(workload.is_cuda)

    def turn(self, name: str, attach: Attach, number: int, seconds: float, with_timeline: bool) -> dict[str, Any]:
        """Run one turn, of `seconds` at most. A failure of the contender is not raised but recorded as `failure`."""
        begin = time.perf_counter()
        done = _Progress()
        record: dict[str, Any] = {"kind": "turn", "label": name, "round": number}
        with self.clean():
            before = self._gauge.held()
            record.update(self._take(name, attach, done, seconds, with_timeline))
        self._held_first = self._held_first or before
        record.update(leftovers(self._held_first, before, self._gauge.held()))
        record.update(self._outcome(name, done), seconds=time.perf_counter() - begin)
        return record

    def _take(self, name: str, attach: Attach, done: _Progress, seconds: float, with_timeline: bool) -> dict[str, Any]:
        """Run and count. In a function of its own, so that nothing of the contender outlives it."""
        counted: dict[str, Any] = {}
        try:
            with attach(self.workload) as attached:
                self._attempt(name, attached, done, seconds)
                counted.update(self._gauge.read())
                counted.update(_engine_record(attached))
                if with_timeline and not done.failure:
                    self.on_step("extra")
                    step = lambda: self.workload.step(attached)  # noqa: E731
                    self.timelines.append(record_memory(name, self._gauge, step))
        except Exception as error:
            done.failure = done.failure or describe(error)
        return counted

    @contextmanager
    def clean(self) -> Iterator[dict[str, int]]:
        """Free memory before a contender, and leave nothing of it behind.

        Gives a dictionary that says, when the block is over, what the contender left behind in spite of that.
        """
        self._gauge.release()
        before = self._gauge.held()
        self._held_first = self._held_first or before
        remains: dict[str, int] = {}
        try:
            yield remains
        finally:
            drop_saved_tensor_hooks()
            self.workload.drop_gradients()
            cut_graphs()
            self._gauge.release()
            remains.update(leftovers(self._held_first, before, self._gauge.held()))

    def watch(self, seconds: float) -> Watch:
        """Bound the time and host memory of the block."""
        left_by_others = self._host_use.taken()
        use = HostUse(self.workload.is_cuda)
        return Watch(seconds, self._host_bytes, use.taken, left_by_others if left_by_others >= _CROWD_BYTES else 0)

    def _attempt(self, name: str, attached: Attached, done: _Progress, seconds: float) -> None:
        try:
            with self.watch(seconds):
                for number in range(self._counts.warmup):
                    self._warm_up(name, attached, done, is_first=number == 0)
                self._gauge.start()
                for _ in range(self._counts.iters):
                    self.on_step(name)
                    done.timings.append(self.workload.timed_step(attached))
        except Exception as error:  # its traceback, with the frames that hold tensors, ends here
            done.failure = describe(error)

    def _warm_up(self, name: str, attached: Attached, done: _Progress, is_first: bool) -> None:
        self.on_step(f"{name}, warm-up")
        begin = time.perf_counter()
        with deterministic() if is_first else nullcontext():
            loss = self.workload.step(attached)
            self.workload.wait()
        done.seconds_of_steps.append(time.perf_counter() - begin)
        if is_first:
            done.fingerprint = fingerprint(self.workload.gradients(), [loss])

    def _outcome(self, name: str, done: _Progress) -> dict[str, Any]:
        if name == REFERENCE and self._reference is None:
            self._reference = done.fingerprint
        parity = {}
        if done.fingerprint is not None and self._reference is not None:
            parity = compare(self._reference, done.fingerprint).as_record()
            parity["is_reference"] = done.fingerprint is self._reference
        times = [timing.step_ms for timing in done.timings]
        return {
            "failure": done.failure,
            "warm_up_s": done.seconds_of_steps,
            "step_ms": times,
            "forward_ms": statistics.median(t.forward_ms for t in done.timings) if times else None,
            "losses": [float.fromhex(loss) for loss in done.fingerprint.losses] if done.fingerprint else [],
            "parity": parity,
        }


def _engine_record(attached: Attached) -> dict[str, Any]:
    """Return the counters of our engine for its last step."""
    stats = attached.stats()
    if stats is None:
        return {}
    return {"engine": {name: value for name, value in asdict(stats).items() if isinstance(value, int)}}


def describe(error: BaseException) -> str:
    """Return one line for a table."""
    if isinstance(error, Stopped):
        return f"stopped: {error}"
    if is_out_of_memory(error):
        return "out of memory"
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the device ran out of memory, also as the cause of another error."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, torch.OutOfMemoryError) or "out of memory" in str(chain).lower():
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def drop_saved_tensor_hooks() -> None:
    """Pop the hooks that a contender left behind after an exception: the next one would save through them."""
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def cut_graphs() -> None:
    """Free the graphs that a contender left behind after an exception.

    What it keeps of a graph's tensors holds the graph, and the graph holds the contender through its hooks. The
    collector cannot find that cycle, as graphs are not Python's. No graph is needed between two contenders.
    """
    left = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and one.grad_fn is not None]
    views = {id(tensor): tensor for tensor in left if tensor._is_view()}
    for tensor in left:
        if id(tensor) not in views:
            tensor.detach_()
    if not views:
        return
    for holder in gc.get_referrers(*views.values()):  # a view cannot be cut off: who keeps it forgets it
        if type(holder) is list and holder is not left:
            holder[:] = [None if id(one) in views else one for one in holder]
        elif type(holder) is dict and holder is not views:
            holder.update({key: None for key, one in holder.items() if id(one) in views})


@contextmanager
def deterministic() -> Iterator[None]:
    """Use kernels whose result does not depend on the order of atomic additions, to be compared bitwise."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
