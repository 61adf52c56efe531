# SPDX-License-Identifier: Apache-2.0
"""`apply()` patches megatron-core and returns a handle to the patches and the engines of the models in training."""

from __future__ import annotations

import os
from collections.abc import Sequence

from megatron_patches._arguments import Settings, config_rows
from megatron_patches._model.modules import canonical_names
from megatron_patches._rows.fsdp import fsdp_rows
from megatron_patches._rows.full_graphs import full_graph_rows
from megatron_patches._rows.fused_wgrad import fused_wgrad_rows
from megatron_patches._rows.host_claims import host_claim_rows
from megatron_patches._rows.moe import moe_rows
from megatron_patches._rows.overlap import overlap_rows
from megatron_patches._rows.recompute import recompute_rows
from megatron_patches._rows.registry import Applied, Patch, apply_patches
from megatron_patches._rows.runtime import Runtime
from megatron_patches._rows.schedules import schedule_rows
from megatron_patches._runtime import ModelRuntime
from megatron_patches._take_over import TakeOver
from megatron_patches._versions import check_supported
from offload_engine import IterationStats, OffloadConfig, OffloadEngine, ResidencyMeter
from offload_engine.sizes import parse_size


class Handle:
    """Owns the patches that one call of `apply()` installed, and their engines. Also a context manager."""

    def __init__(self, runtime: ModelRuntime, applied: Applied) -> None:
        self._runtime = runtime
        self._applied: Applied = applied

    @property
    def engine(self) -> OffloadEngine | None:
        """Return the engine of the model that trained last; None before the first step and after the model is freed."""
        return self._runtime.latest_engine

    @property
    def stats(self) -> IterationStats | None:
        """Return the counters of the running or last step; None before the first and after the model is freed."""
        return self.engine.stats if self.engine is not None else None

    @property
    def mistake(self) -> Exception | None:
        """Return the last error that refused settings or a model, if any: its text says what to change."""
        return self._runtime.mistake

    def __str__(self) -> str:
        """Return one line about the last step of this rank: `print(handle)`."""
        return "no step yet" if self.engine is None else str(self.engine)

    def record(self, file: str | os.PathLike[str] | None = None) -> None:
        """Record the next training step of the model that took the last one; see `OffloadEngine.record`.

        Raises:
            RuntimeError: before the first training step.
        """
        if self.engine is None:
            raise RuntimeError("no model has trained yet: call record() after the first training step")
        self.engine.record(file)

    def report(self) -> str | None:
        """Return the tables of the last recorded step, or else of the last step's counters; None before the first."""
        return self.engine.report() if self.engine is not None else None

    def remove(self) -> None:
        """Remove every hook and patch and close the engines. Idempotent.

        Raises:
            PatchError: if patches applied later are still in force on top of these; nothing is removed then.
            OffloadError: if megatron-core still has the graph of a captured step; nothing is removed then.
        """
        self._applied.check_uncovered()
        self._runtime.close()
        self._applied.remove()

    def abandon(self) -> None:
        """Leave everything as it is, because this process ends by an error in a step that other ranks take part in.

        `remove` would wait for the device, which may wait for these ranks for ever, and nobody would see the error.
        """
        self._runtime.abandon()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


def apply(
    config: OffloadConfig | None = None,
    *,
    modules: Sequence[str] = (),
    meter: ResidencyMeter | None = None,
    trace: str | None = None,
    has_report: bool = True,
    gpu_budget: str | int | None = None,
    plan: str | None = None,
    plan_plot: str | None = None,
    may_recompute: bool = True,
    replace_fine_grained: bool = False,
) -> Handle:
    """Patch megatron-core to offload activations, until `Handle.remove()`.

    Call it before the configuration of a model is made. The configuration selects the modules:
    `TransformerConfig(offload_activation=True, offload_modules=[...])`. A dataclass derived from TransformerConfig has
    these fields if it is defined after this call; for models with any other configuration pass `modules`. The fields
    may change between two steps, on all ranks of a pipeline alike, and only if all of them offload: a rank that does
    not would skip the collective checks of the others, which would then wait for ever. If they switch offload off,
    hooks, the engine and the recomputation of a budget are removed before the next step.

    Args:
        config: settings of the engines, if the model's configuration sets none; its budget and its `recompute` are
            those of `gpu_budget` and `may_recompute`.
        modules: names to offload in models whose configuration does not ask for offload; empty: none.
        meter: counts resident bytes; None: each engine has its own.
        trace: file for the recording of the second step, if the model's configuration sets none.
        has_report: log the tables of the second step of all ranks, once and on rank 0, unless the model's configuration
            says no. Every rank that offloads then records that step. Only rank 0 waits for other ranks, for seconds.

        gpu_budget: what each process may hold on its GPU, if the model's configuration sets no budget: a size, a share,
            or "auto". It offloads all that a model has, unless `modules` or the configuration names some.
        plan: file of the plan to begin with, and to write, if the model's configuration sets none.
        plan_plot: file for the picture of that plan, if the model's configuration sets none.
        may_recompute: with a budget, make layers recompute tensors that are cheaper to recompute than to move, unless
            the model's configuration says no.
        replace_fine_grained: take over megatron-core's own offload in every configuration made from now on that asks
            for it, as `TransformerConfig(offload_engine=True)` does in one. The log says how each is translated.

    Raises:
        RuntimeError: if megatron-core is missing or its version is not supported.
        PatchError: if the patches are already in force.
        ValueError: if a module name is unknown, or the budget is not a size.
    """
    config = config or OffloadConfig()
    gpu_budget = config.gpu_budget if gpu_budget is None else gpu_budget
    budget = None if gpu_budget is None else parse_size(str(gpu_budget))
    settings = Settings(
        config.replace(gpu_budget=None, recompute="auto"),
        canonical_names(modules),
        trace,
        has_report,
        budget,
        plan,
        plan_plot,
        may_recompute=may_recompute and config.recompute != "off",
        is_taken_over=replace_fine_grained,
    )
    return apply_settings(settings, meter)


def apply_settings(settings: Settings, meter: ResidencyMeter | None = None) -> Handle:
    """Patch megatron-core like `apply`, for settings that are already resolved."""
    check_supported()
    runtime, take_over = ModelRuntime(settings, meter), TakeOver(settings.is_taken_over)
    return Handle(runtime, apply_patches(patch_rows(runtime, take_over, is_on_by_default=settings.is_on)))


def patch_rows(runtime: Runtime, take_over: TakeOver | None = None, *, is_on_by_default: bool = False) -> list[Patch]:
    """Return all rows for the models of `runtime`; see `config_rows` for the other arguments."""
    return [
        *config_rows(take_over, is_on_by_default=is_on_by_default),
        *schedule_rows(runtime),
        *full_graph_rows(runtime),
        *overlap_rows(runtime),
        *recompute_rows(runtime),
        *host_claim_rows(runtime),
        *moe_rows(runtime),
        *fused_wgrad_rows(runtime),
        *fsdp_rows(runtime),
    ]
