# SPDX-License-Identifier: Apache-2.0
"""Gloo ranks in forked processes: a test with two ranks costs a fraction of a second.

The ranks are forked from a server that is started once, has imported torch and megatron-core and nothing more, and runs
no threads. (The process of the tests itself may run some: the CPU device copies in worker threads.)
"""

from __future__ import annotations

import functools
import gc
import importlib
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

# What the server imports; the ranks then have it for nothing.
PRELOAD = ["tests.dist.preload"]
_EXIT_S = 10.0


class Pipeline(NamedTuple):
    """Shape of the process group. Ranks not used by the pipeline are data parallel."""

    size: int = 1
    virtual: int | None = None
    expert: int = 1
    tensor: int = 1
    context: int = 1
    instances: int = 1
    """Of the distributed optimizer: data-parallel ranks are split into so many groups that each share its state."""

    @property
    def num_ranks(self) -> int:
        """Return the fewest that it takes; experts may be spread over the ranks of one context."""
        return self.size * self.tensor * max(self.expert, self.context)


class PlainGroup(NamedTuple):
    """A process group and nothing else: no megatron-core."""


class Variables(NamedTuple):
    """What torchrun tells its processes, and nothing else."""

    meeting: dict[str, str]
    """Of `agent_store`."""


class RankFailed(AssertionError):
    """A rank raised, died or did not finish; the message holds its traceback."""


@contextmanager
def agent_store() -> Iterator[dict[str, str]]:
    """Yield the variables by which ranks find a store that listens already, as under the agent of torchrun.

    So no port has to stay free until rank 0 listens: the system has given it to this store.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    yield {**own, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}


def run_ranks(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int | None = None,
    pipeline: Pipeline | PlainGroup | Variables | None = Pipeline(),  # noqa: B008  # immutable
    timeout_s: float = 120.0,
    has_children: bool = False,
) -> list[Any]:
    """Run `fn(*args)` on every rank of a new process group and return the results in the order of ranks.

    Args:
        fn: a function at module level (it is pickled), run with megatron-core's parallel state and CPU support set up.
        args: for `fn`; pickled.
        world_size: number of ranks; None: as few as the pipeline takes.
        pipeline: shape of the parallel state; None: one plain process, nothing set up; `PlainGroup()`: that, and a
            process group of gloo; `Variables(meeting)`: that of torchrun, for a program that makes its own.
        timeout_s: for all ranks together.
        has_children: whether ranks start processes of multiprocessing themselves, which have to end with them.

    Raises:
        RankFailed: if a rank raises, dies, or does not finish in time.
    """
    if world_size is None:
        world_size = pipeline.num_ranks if isinstance(pipeline, Pipeline) else 1
    context = _server()
    with tempfile.TemporaryDirectory() as directory:
        ranks = []
        for rank in range(world_size):
            reader, writer = context.Pipe(duplex=False)
            group = Group(rank, world_size, f"file://{directory}/store", pipeline)
            process = context.Process(target=_rank_main, args=(writer, group, fn, args), daemon=not has_children)
            process.start()
            writer.close()
            ranks.append((process, reader))
        try:
            results = collect([reader for _, reader in ranks], timeout_s)
            for process, _ in ranks:
                process.join(_EXIT_S)  # where coverage is measured, it writes its file after the result was sent
            return results
        finally:
            for process, _ in ranks:
                process.kill()
                process.join()


@functools.cache
def _server() -> Any:
    """Start the server; its imports are no part of the time that the first ranks have."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    first = context.Process(target=int)
    first.start()
    first.join()
    return context


def on_ranks(
    pipeline: Pipeline | PlainGroup | None = Pipeline(),  # noqa: B008  # immutable
    *,
    world_size: int | None = None,
    timeout_s: float = 120.0,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function at module level: it runs on every rank, set up as by `run_ranks`.

    A parameter `shape` of the test is its pipeline, one named `world_size` its number of ranks.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**parameters: Any) -> None:
            options: dict[str, Any] = {"pipeline": parameters.get("shape", pipeline), "timeout_s": timeout_s}
            number = parameters.get("world_size", world_size)
            run_ranks(_run_body, body.__module__, body.__name__, parameters, world_size=number, **options)

        return test

    return decorate


def _run_body(module: str, name: str, parameters: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**parameters)


class Group(NamedTuple):
    rank: int
    world_size: int
    store: str
    pipeline: Pipeline | PlainGroup | Variables | None


class Outcome(NamedTuple):
    """What a rank sends back, as a tuple."""

    result: Any = None
    error: str | None = None


def collect(readers: Sequence[Connection], timeout_s: float) -> list[Any]:
    """Return the results of all ranks in their order.

    Waits no longer than a moment once one has failed: the others may wait for it for ever.

    Raises:
        RankFailed: if a rank has raised or died, or does not finish in time; with the whole text of the first, which
            made the others fail.
    """
    outcomes = _receive_all(readers, time.monotonic() + timeout_s)
    failures = [(rank, outcome.error) for rank, outcome in outcomes.items() if outcome.error]
    if failures:
        (rank, error), *later = failures
        ends = (f"rank {rank}, later: {error.strip().splitlines()[-1]}" for rank, error in later)
        raise RankFailed("\n".join([f"rank {rank}: {error}", *ends]))
    return [outcomes[rank].result for rank in range(len(readers))]


def _receive_all(readers: Sequence[Connection], deadline: float) -> dict[int, Outcome]:
    """Return the outcome of each rank, in the order in which they came."""
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < len(readers) and time.monotonic() < deadline:
        waiting = [reader for rank, reader in enumerate(readers) if rank not in outcomes]
        for reader in multiprocessing.connection.wait(waiting, timeout=max(0.0, deadline - time.monotonic())):
            outcome = outcomes[readers.index(reader)] = _receive(reader)
            if outcome.error:
                deadline = min(deadline, time.monotonic() + 5.0)
    missing = set(range(len(readers))) - outcomes.keys()
    return outcomes | {rank: Outcome(error="did not finish in time") for rank in missing}


def _receive(reader: Any) -> Outcome:
    try:
        return Outcome(*reader.recv())
    except (EOFError, ConnectionResetError):  # the latter if it had not read all that it was sent
        return Outcome(error="died without a word")


def _rank_main(writer: Connection, group: Group, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    gc.disable()  # as in the process of the tests: a reference cycle shows as memory that stays
    try:
        if isinstance(group.pipeline, Pipeline):
            from megatron_patches import apply_cpu_support

            apply_cpu_support()
            set_up_groups(group, group.pipeline)
        elif isinstance(group.pipeline, Variables):
            set_variables(group)
            os.environ.update(group.pipeline.meeting)
        elif group.pipeline is not None:
            set_up_process_group(group)
        outcome = Outcome(result=fn(*args))
    except BaseException:
        outcome = Outcome(error=traceback.format_exc())
    writer.send(tuple(outcome))
    writer.close()
    os._exit(0)  # without waiting for gloo's threads, whose peers may be gone


def set_variables(group: Group) -> None:
    rank, size = str(group.rank), str(group.world_size)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, GLOO_SOCKET_IFNAME="lo")


def set_up_process_group(group: Group) -> None:
    import torch

    set_variables(group)
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=group.store,
        rank=group.rank,
        world_size=group.world_size,
        timeout=timedelta(seconds=60),
    )


def set_up_groups(group: Group, shape: Pipeline) -> None:
    set_up_process_group(group)
    set_up_parallel_state(shape)


def set_up_parallel_state(shape: Pipeline) -> None:
    """megatron-core's groups, over the process group that there is, and its seeds."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=shape.tensor,
        pipeline_model_parallel_size=shape.size,
        virtual_pipeline_model_parallel_size=shape.virtual,
        expert_model_parallel_size=shape.expert,
        context_parallel_size=shape.context,
        num_distributed_optimizer_instances=shape.instances,
    )
    model_parallel_cuda_manual_seed(123)
