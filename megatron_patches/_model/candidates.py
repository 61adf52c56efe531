# SPDX-License-Identifier: Apache-2.0
"""Finds what a model can offload, for a budget to choose from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from megatron_patches._model.graphs import captured_names, check_cuda_graphs
from megatron_patches._model.modules import EXPERTS, MODULES, drop_parts, is_in_experts
from megatron_patches._model.sites import find_sites, own_norms, survey
from megatron_patches._model.validate import check_conflicts, check_parts_are_called
from offload_engine.counted import counted
from offload_engine.planning.choices import Slot

# The parts of these move separately, so that each can be chosen. Experts have too many parts for that.
_IN_PARTS = ("self_attn", "mamba_mixer")
_OF_CHECKPOINTS = "layer_input"  # saved by a checkpoint of layers, not at a site


def find_candidates(
    config: Any, chunks: Sequence[torch.nn.Module], has_budget: bool
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the names of the table to offload in these chunks, and those left out with the reason.

    Args:
        config: of the model.
        chunks: this rank's model chunks.
        has_budget: a budget chooses among them, so none that a graph captures.
    """
    sites = survey(chunks).sites
    names, left_out = [], {}
    if config.recompute_granularity == "full":
        sites["layer_input"] = max(1, sites["layer_input"])  # what a checkpoint of layers saves, even without a norm
    for name in (row.name for row in MODULES if sites[row.name]):
        reason = "its parts move separately" if name in _IN_PARTS else _why_refused(config, name, chunks, has_budget)
        if reason is None:
            names.append(name)
        else:
            left_out[name] = reason
    whole, parts = drop_parts(names)
    return whole, left_out | dict.fromkeys(parts, "it moves as a part of another name")


def find_among(
    config: Any, chunks: Sequence[torch.nn.Module], names: Sequence[str], has_budget: bool
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return those of `names` with something to move in these chunks, and the others with the reason.

    Args:
        config: of the model.
        chunks: this rank's model chunks.
        names: of the table.
        has_budget: a budget chooses among them, so none that a graph captures.
    """
    found, left_out = survey(chunks), {}
    for name in names:
        if not found.sites[name] and not (name == "layer_input" and config.recompute_granularity == "full"):
            is_fused = name in found.identities
            left_out[name] = "its module is an identity here" if is_fused else "this rank has no such module"
        elif (reason := _why_refused(config, name, chunks, has_budget)) is not None:
            left_out[name] = reason
    return tuple(name for name in names if name not in left_out), left_out


def check_plan(source: str, slots: Iterable[Slot], chunks: Sequence[torch.nn.Module], names: Sequence[str]) -> None:
    """Refuse a plan with groups that these chunks cannot have, before the first step.

    Args:
        source: origin of the plan, with the flag that named it.
        slots: slots of the plan.
        chunks: this rank's model chunks.
        names: names to offload, or those of `find_candidates`.

    Raises:
        ValueError: if there is such a group; names `source` and the first one.
    """
    sites = [(stage, site) for stage, chunk in enumerate(chunks) for site in find_sites(chunk, drop_parts(names)[0])]
    here = {(stage, site.layer, site.name) for stage, site in sites}
    unknown = sorted(slot for slot in slots if slot.name != _OF_CHECKPOINTS and slot[:3] not in here)
    if unknown:
        raise ValueError(
            f"{source} is of another model or layout: it names a group that is not here ({unknown[0]}), and this rank "
            f"has {counted(len(chunks), 'stage')} with {', '.join(names)}. Remove the file, and a new plan is made"
        )


def _why_refused(config: Any, name: str, chunks: Sequence[torch.nn.Module], has_budget: bool) -> str | None:
    if getattr(config, "moe_paged_stash", False) and is_in_experts(name):
        return f"moe_paged_stash keeps what {EXPERTS} saves"
    chooses_captured = has_budget and bool(captured_names(config, [name]))
    checks: tuple[Callable[[], None], ...] = (
        lambda: check_cuda_graphs(config, [name], has_budget=chooses_captured),
        lambda: check_conflicts(config, [name], own_norms(chunks)),
        lambda: check_parts_are_called(config, [name], chunks),
    )
    for check in checks:
        try:
            check()
        except (ValueError, NotImplementedError) as error:
            return str(error).partition(", but ")[2] or str(error)
    return None
