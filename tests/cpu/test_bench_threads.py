"""Forward and backward on one CPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from tests.cpu.test_bench_gpu import tools_on_path

with tools_on_path():
    from bench_gpu import settings, threads

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and two CPUs"
)


@pytest.fixture
def others() -> Iterator[dict[str, int]]:
    """Two threads by their names; threads of Python's do not tell the system theirs, so they are set here."""
    found: dict[str, int] = {}
    is_named, is_over = threading.Barrier(3), threading.Event()

    def run(name: str) -> None:
        found[name] = threading.get_native_id()
        (threads._TASKS / str(found[name]) / "comm").write_text(name)
        is_named.wait()
        is_over.wait()

    started = [threading.Thread(target=run, args=(name,)) for name in ("pt_autograd_0", "watchdog")]
    for thread in started:
        thread.start()
    is_named.wait()
    yield found
    is_over.set()
    for thread in started:
        thread.join()


def test_forward_and_backward_share_one_that_no_other_thread_is_on(others: dict[str, int]) -> None:
    before = os.sched_getaffinity(0)
    with threads.on_one_cpu(0, 1, "pt_autograd_0"):
        own = os.sched_getaffinity(0)
        assert len(own) == 1 and os.sched_getaffinity(others["pt_autograd_0"]) == own
        assert os.sched_getaffinity(others["watchdog"]) == before - own
    assert all(os.sched_getaffinity(thread) == before for thread in (0, *others.values()))


def test_ranks_have_each_their_own(others: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    bound: dict[int, set[int]] = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(range(10, 26)))
    monkeypatch.setattr(os, "sched_setaffinity", bound.__setitem__)
    seen = []
    for rank in range(4):
        with threads.on_one_cpu(rank, 4, "pt_autograd_0"):
            seen.append((bound[os.getpid()], bound[others["watchdog"]]))
    assert seen == [({cpu}, set(range(10, 26)) - {10, 14, 18, 22}) for cpu in (10, 14, 18, 22)]


@pytest.mark.parametrize(("num_ranks", "thread"), [(1, "pt_autograd_7"), (1000, "pt_autograd_0")])
def test_what_cannot_be_is_an_error(num_ranks: int, thread: str, others: dict[str, int]) -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(RuntimeError, match="--one-cpu"), threads.on_one_cpu(0, num_ranks, thread):
        pass
    assert os.sched_getaffinity(0) == before


def test_it_is_asked_for() -> None:
    assert [settings.parse(flags).one_cpu for flags in ([], ["--one-cpu"])] == [False, True]
