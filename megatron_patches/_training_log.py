# SPDX-License-Identifier: Apache-2.0
"""`TrainingLog`: adds offload's figures to the log line of Megatron-LM's training loop, to TensorBoard and to W&B."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any, Final

import torch

from megatron_patches._rows.registry import Applied, Patch, PatchError, apply_patches
from offload_engine import IterationStats, OffloadEngine
from offload_engine.stats import StepTimes

logger = logging.getLogger(__name__)

_LOOP: Final = "megatron.training.training"
_WHY: Final = "figures of activation offload in the training log"
_LABELS: Final = {
    "moved_gib": "moved (GiB)",
    "moved_percent": "moved (%)",
    "peak_resident_gib": "peak on the device (GiB)",
    "peak_host_gib": "peak on the host (GiB)",
    "waited_ms": "waited (ms)",
    "late": "late",
}
_FIELDS: Final = tuple(field.name for field in dataclasses.fields(IterationStats))


class TrainingLog:
    """Adds figures to the log of the training loop of Megatron-LM, as often as it logs.

    They are sums over the ranks of one pipeline, the one whose last rank writes the log; peaks and waits are maxima.
    No-op with another training loop.

    Args:
        engine: returns the engine of the model that trained last.
    """

    def __init__(self, engine: Callable[[], OffloadEngine | None]) -> None:
        self._engine = engine
        self._applied: Applied | None = None
        self._pipeline: Any = None
        self._text = ""  # for the line that is about to be printed

    def attach(self, pipeline: Any) -> None:
        """Patch the running loop, if it is Megatron-LM's, which the script has imported by its first step. Idempotent.

        Args:
            pipeline: the pipeline-parallel process group; None: one rank. All its ranks call this.
        """
        loop = sys.modules.get(_LOOP)
        if self._applied is not None or loop is None:
            return
        self._pipeline = pipeline
        rows = [
            Patch(target=f"{_LOOP}:training_log", wrapper=functools.partial(self._around_log, loop=loop), why=_WHY),
            Patch(target=f"{_LOOP}:print_rank_last", wrapper=self._around_print, why=_WHY),
        ]
        try:
            self._applied = apply_patches(rows)
        except PatchError as error:  # must not end a training run
            self._applied = Applied()
            logger.warning("the training log will not show offload figures: %s", error)

    def remove(self) -> None:
        """Restore the loop. Idempotent."""
        if self._applied is not None:
            self._applied.remove()
            self._applied = None

    def _around_log(self, original: Callable[..., Any], loop: Any) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def training_log(*args: Any, **kwargs: Any) -> Any:
            iteration = signature.bind(*args, **kwargs).arguments["iteration"]
            interval = max(1, loop.get_args().log_interval)
            if iteration % interval == 0:
                self._log(loop, iteration)
            try:
                return original(*args, **kwargs)
            finally:
                self._text = ""
                engine = self._engine()
                if engine is not None and (iteration + 1) % interval == 0:
                    engine.timer.ask()

        return training_log

    def _around_print(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def print_rank_last(message: Any) -> Any:
            return original(f"{message}{self._text}" if self._text and " iteration " in str(message) else message)

        return print_rank_last

    def _log(self, loop: Any, iteration: int) -> None:
        metrics = self._metrics()
        self._text = "".join(f" offload {_LABELS[name]}: {value:.4g} |" for name, value in metrics.items())
        board, wandb = (getattr(loop, f"get_{name}_writer", lambda: None)() for name in ("tensorboard", "wandb"))
        for name, value in metrics.items():
            if board is not None:
                board.add_scalar(f"offload/{name}", value, iteration)
        if wandb is not None and metrics:
            wandb.log({f"offload/{name}": value for name, value in metrics.items()}, iteration)

    def _metrics(self) -> dict[str, float]:
        """Return the figures of the pipeline. Collective over its ranks."""
        engine = self._engine()
        stats = IterationStats() if engine is None else engine.stats
        times = None if engine is None else engine.timer.times
        largest = [float(getattr(stats, name)) for name in _FIELDS]
        largest += [0.0, 0.0] if times is None else list(times)
        sums = largest
        if self._pipeline is not None and self._pipeline.size() > 1:
            sums, largest = self._reduce(largest, "SUM"), self._reduce(largest, "MAX")
        both = zip(_FIELDS, sums, largest, strict=False)
        total = IterationStats(**{name: int(top if name.startswith("peak") else all_) for name, all_, top in both})
        if not total.num_groups:
            return {}
        step_ms, waited_ms = largest[-2:]
        found = total.metrics(StepTimes(step_ms, waited_ms) if step_ms else None)
        return {name: found[name] for name in _LABELS if name in found}

    def _reduce(self, values: list[float], operation: str) -> list[float]:
        is_nccl = torch.distributed.get_backend(self._pipeline) == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
        tensor = torch.tensor(values, dtype=torch.float64, device=device)
        torch.distributed.all_reduce(tensor, getattr(torch.distributed.ReduceOp, operation), group=self._pipeline)
        reduced: list[float] = tensor.tolist()
        return reduced
