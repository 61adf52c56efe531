# SPDX-License-Identifier: Apache-2.0
"""Training steps with offload against the same steps without it, on one rank."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from megatron_patches import Handle, apply
from megatron_patches._hooks.attach import last_of_each_name
from megatron_patches._model.modules import canonical_names, drop_parts
from megatron_patches._model.sites import count_layers, find_sites
from megatron_patches._rows.runtime import unwrap
from megatron_patches._versions import installed_version, is_in_range
from offload_engine import Action, ChunkKey, IterationStats, ResidencyMeter
from offload_engine.schedule import backward_at_once, interleaved, no_pipelining, one_forward_one_backward
from tests.dist.streams import adversarial_device
from tests.dist.tiny import ALL, check_bits, engine_of, fingerprint, make_chunks, make_config, run, stats_of

SAVES_COPIES = is_in_range(installed_version(), "<0.20")
"""Whether `CheckpointWithoutOutput` saves detached copies of its inputs, and not the inputs themselves. Without copies
nothing keeps them, and nothing is emptied in place."""

EXPERTS = ["router_fc1", "moe_act", "router_fc2"]


class Case(NamedTuple):
    """One model, and what to offload in it."""

    kind: str
    names: Sequence[str]
    dtype: torch.dtype = torch.float32
    settings: dict[str, Any] = {}  # noqa: RUF012
    wrap: bool = False
    change: Callable[[torch.nn.Module], None] | None = None
    """Of each model chunk as it was built."""


def check_all(cases: Sequence[Case], microbatches: Sequence[int]) -> None:
    """On one rank: every case without offload, then with.

    Of several numbers of microbatches, the first case has all, each other one two: together they see every change.
    Evaluation before and between the steps comes with the first case of each model, the table of the second one with
    the first case of all: names change nothing about them.
    """
    gc.disable()
    references = References()
    for index, case in enumerate(cases):
        is_first, at = not references.has(case), (index - 1) % len(microbatches)
        numbers = [*microbatches[at:], microbatches[0]][:2] if index and len(microbatches) > 1 else microbatches
        run_with(case, numbers, references.of(case, numbers), is_evaluated=is_first, has_report=index == 0)


class References:
    """Steps without offload, each run once, however many cases of one model are compared with it."""

    def __init__(self) -> None:
        self._models: dict[tuple[Any, ...], dict[int, dict[str, str]]] = {}

    def has(self, case: Case) -> bool:
        """Tell whether any step of this model has been run."""
        return _model_of(case) in self._models

    def of(self, case: Case, microbatches: Sequence[int]) -> list[dict[str, str]]:
        """Return the fingerprint of a step at each of these numbers of microbatches."""
        steps = self._models.setdefault(_model_of(case), {})
        missing = [n for n in microbatches if n not in steps]
        if missing:
            steps.update(zip(missing, run_without(case, missing), strict=True))
        return [steps[n] for n in microbatches]


def _model_of(case: Case) -> tuple[Any, ...]:
    """Return all that a step without offload depends on, except its number of microbatches."""
    # A step leaves the weights as they are, so it depends on no other.
    return case.kind, case.dtype, repr(sorted(case.settings.items())), case.wrap, case.change


def run_without(case: Case, microbatches: Sequence[int]) -> list[dict[str, str]]:
    chunks = make_chunks(make_config(case.kind, case.dtype, **case.settings), wrap=case.wrap, change=case.change)
    return [fingerprint(chunks, run(chunks, n)) for n in microbatches]


def run_with(
    case: Case,
    microbatches: Sequence[int],
    expected: list[dict[str, str]],
    *,
    is_evaluated: bool = False,
    has_report: bool = False,
) -> list[IterationStats]:
    """Compare steps with offload with `expected`; return the counters of each.

    Args:
        case: the model.
        microbatches: of each step.
        expected: the fingerprints of the same steps without offload.
        is_evaluated: an evaluation comes before each step and behind the last; it changes nothing.
        has_report: the second step is recorded, and its tables are made.
    """
    meter, counters = ResidencyMeter(), []
    with apply(ALL, meter=meter, has_report=has_report) as handle:
        settings = {**case.settings, "offload_activation": True, "offload_modules": list(case.names)}
        chunks = make_chunks(make_config(case.kind, case.dtype, **settings), wrap=case.wrap, change=case.change)
        if is_evaluated:
            run(chunks, microbatches[-1], forward_only=True)
        assert handle.engine is None, "evaluation must not start anything"
        for n, wanted in zip(microbatches, expected, strict=True):
            got = fingerprint(chunks, run(chunks, n))
            check_bits(wanted, got, case, n)
            _check_counters(case, handle, chunks, n)
            assert meter.current_bytes == 0 and engine_of(handle).pool.num_leases == 0
            counters.append(stats_of(handle))
            if is_evaluated:
                run(chunks, microbatches[0], forward_only=True)
    return counters


def run_ordered(case: Case, microbatches: Sequence[int], seed: int | None = 1) -> list[IterationStats]:
    """Compare steps with those without offload on the adversarial device, which must find each copy ordered."""
    expected = run_without(case, microbatches)
    with adversarial_device(seed) as device:
        counters = run_with(case, microbatches, expected)
        assert device.hazards == [], case
    return counters


def _check_counters(case: Case, handle: Handle, chunks: Sequence[torch.nn.Module], num_microbatches: int) -> None:
    stats = handle.stats
    assert stats is not None and stats.num_storages_left == 0
    assert stats.copied_in_bytes <= stats.copied_out_bytes <= stats.managed_bytes
    if case.settings.get("recompute_granularity"):
        assert stats.num_groups and (stats.copied_out_bytes > 0) == (stats.num_groups > stats.num_kept_groups), case
        if case.settings["recompute_granularity"] == "full" and len(case.names) == 1:
            layers = sum(count_layers(unwrap(chunk)) for chunk in chunks)
            assert stats.num_groups == num_microbatches * layers
            assert stats.num_kept_groups == len(_backward_at_once(case, num_microbatches))
        return
    names, _ = drop_parts(canonical_names(case.names))
    sites = [find_sites(unwrap(chunk), names) for chunk in chunks]
    at_once = _backward_at_once(case, num_microbatches)
    groups = num_microbatches * sum(len(of_chunk) for of_chunk in sites)
    kept = sum(len(last_of_each_name(unwrap(chunks[key.stage]), sites[key.stage])) for key in at_once)
    assert (stats.num_groups, stats.num_kept_groups) == (groups, kept), case
    assert (stats.copied_out_bytes > 0) == (groups > kept), case
    if len(case.names) == 1:
        # Experts share one storage of tokens, and some get none; so do the projections to the latents their input.
        is_shared = canonical_names(case.names)[0] in (*EXPERTS, "dispatched_tokens")
        is_exact = not (is_shared or case.settings.get("multi_latent_attention"))
        assert stats.num_offloaded_groups == groups - kept or not is_exact, case


def _backward_at_once(case: Case, num_microbatches: int) -> frozenset[ChunkKey]:
    is_combined = case.settings.get("overlap_moe_expert_parallel_comm", False)
    return backward_at_once(actions(case, num_microbatches), is_combined)


def actions(case: Case, num_microbatches: int) -> list[Action]:
    """Return what this rank runs in a step."""
    from megatron.core import parallel_state as ps

    size, rank = ps.get_pipeline_model_parallel_world_size(), ps.get_pipeline_model_parallel_rank()
    virtual = ps.get_virtual_pipeline_model_parallel_world_size()
    is_combined = case.settings.get("overlap_moe_expert_parallel_comm", False)
    if size == 1:
        return no_pipelining(num_microbatches, is_combined)
    if virtual is None:
        return one_forward_one_backward(size, rank, num_microbatches)
    group_size = case.settings.get("microbatch_group_size_per_vp_stage", size)
    return interleaved(size, rank, virtual, num_microbatches, group_size, is_combined)
