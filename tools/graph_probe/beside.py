"""Several captured steps in one process, replayed in turn: what copies cost, without what differs between processes."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from graph_probe.stage import Job, Shape, kernels, memory
from graph_probe.whole import Offload

STEPS: dict[str, tuple[str | None, str]] = {
    "none": (None, "lowest"),
    "qkv": ("qkv", "lowest"),
    "mlp": ("mlp", "lowest"),
}
"""The part that is offloaded, and the policy. All at once they take 65 GiB at 8192 tokens."""


def run_beside(shape: Shape, rounds: int, emit: Callable[..., None]) -> None:
    """Replay each captured step once a round, in turn; tell times over those without offload in the same round."""
    with ExitStack() as stack:
        stack.enter_context(kernels())
        stream = torch.cuda.Stream()
        stack.enter_context(torch.cuda.stream(stream))
        graphs: dict[str, torch.cuda.CUDAGraph] = {}
        kept = []  # what the graphs use
        for name, (part, policy) in STEPS.items():
            job = Job(shape)
            offload = None if part is None else Offload(job, part, policy, False)
            graphs[name] = captured_step(job, offload, stream)
            kept.append((job, offload))
            emit(stage="captured", of=name, **memory("all_so_far"))
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for number in range(rounds + 1):
            for name in _turned(list(graphs), number):
                milliseconds = _replay(graphs[name])
                if number:  # the first warms up
                    times[name].append(milliseconds)
        for name, own in times.items():
            emit(stage="timed", of=name, **_summary(own, times["none"]))


def captured_step(job: Job, offload: Offload | None, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """Run three steps eagerly and capture the fourth."""
    iteration = ExitStack if offload is None else offload.iteration
    for _ in range(3):
        job.step(iteration)
    torch.cuda.synchronize()
    job.losses = []
    gc.collect()
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    capture = torch.cuda.graph(graph, stream=stream)
    with capture if offload is None else offload.engine.graphs.capture(capture):
        job.step(iteration)
    return graph


def _turned(names: list[str], number: int) -> list[str]:
    first = number % len(names)
    return names[first:] + names[:first]


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)


def _summary(own: list[float], without: list[float]) -> dict[str, Any]:
    ratios = [one / other for one, other in zip(own, without, strict=True)]
    quarters = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "step_ms": round(statistics.median(own), 2),
        "steps_ms": [round(one, 2) for one in own],
        "over_none": round(statistics.median(ratios), 4),
        "over_none_quarters": [round(ratio, 4) for ratio in quarters],
    }
