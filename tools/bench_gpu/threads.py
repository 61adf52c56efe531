"""Where the host's threads run: forward and backward of a rank on one CPU.

Autograd runs the backward in a thread of its own. While that thread works the one of the forward waits, and each finds
the caches of its CPU cold that the other has just filled on another one. A model for which the GPU waits takes a tenth
longer so, and by how much longer depends on where the two have gone. On one CPU it takes the same time again and again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TASKS = Path("/proc/self/task")


@contextmanager
def on_one_cpu(rank: int, num_ranks: int, backward: str) -> Iterator[None]:
    """Has the calling thread and that of the backward share a CPU that no other thread of this node's ranks is on.

    Threads that are made inside, by either of the two, begin on that CPU as well: pinned memory is best made before.

    Args:
        rank: of this process, on its node.
        num_ranks: of the node.
        backward: name of the thread of the backward, "pt_autograd_0" for the first GPU; it must have run one already.

    Raises:
        RuntimeError: if there is no such thread, or there are not two CPUs for each rank.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2 * num_ranks:
        raise RuntimeError(f"--one-cpu needs two CPUs for each of {num_ranks} ranks, there are {len(cpus)}")
    own = [cpus[index * len(cpus) // num_ranks] for index in range(num_ranks)]
    names = {int(task.name): (task / "comm").read_text().strip() for task in _TASKS.iterdir()}
    pair = {os.getpid(), *(thread for thread, name in names.items() if name == backward)}
    if len(pair) != 2:
        raise RuntimeError(f"--one-cpu found no thread {backward!r} among {sorted(set(names.values()))}")
    before = {thread: os.sched_getaffinity(thread) for thread in names}
    try:
        for thread in names:
            _bind(thread, {own[rank]} if thread in pair else set(cpus) - set(own))
        yield
    finally:
        for thread, allowed in before.items():
            _bind(thread, allowed)


def _bind(thread: int, cpus: set[int]) -> None:
    try:
        os.sched_setaffinity(thread, cpus)
    except ProcessLookupError:  # it has ended
        pass
