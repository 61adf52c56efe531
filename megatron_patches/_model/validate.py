# SPDX-License-Identifier: Apache-2.0
"""Checks that a model supports its settings, before the first training step and with the same result on every rank."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from megatron_patches._model.modules import MODULES, ModuleRow, drop_parts, row_of, whole_of
from megatron_patches._model.sites import BLOCKS, Survey, calls_no_parts, find_sites, merge_surveys, survey
from megatron_patches._model.thresholds import Thresholds
from offload_engine import IterationStats, OffloadConfig, ResidentBudget
from offload_engine.counted import counted

logger = logging.getLogger(__name__)

_UNEVEN_STAGES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)


class _Report(NamedTuple):
    """Sent by one rank to the others of its pipeline."""

    survey: Survey | None = None
    problem: str | None = None
    names: tuple[str, ...] = ()
    """Names that the rank offloads."""

    has_moved: bool = False
    """Whether the rank copied out anything in its first step."""

    has_budget: bool = False
    """Whether a budget decides what the rank offloads."""

    thresholds: Thresholds = Thresholds()
    """Least sizes of what each name moves."""


def check_conflicts(config: Any, names: Sequence[str], norms: frozenset[str]) -> None:
    """Reject names with which nothing would move, because their module is recomputed or never called as a whole.

    Args:
        config: the model's.
        names: names of the table.
        norms: the model's `own_norms`.

    Raises:
        ValueError: if a name conflicts with another setting; names both.
    """
    for name in names:
        row = row_of(name)
        conflict = (
            _full_conflict(config, name)
            or _selective_conflict(config, row, norms)
            or _norm_conflict(config, row)
            or _shared_experts_conflict(config, name)
        )
        if conflict:
            raise ValueError(f"offload_modules has {name!r}, but {conflict}{_other_names([name])}")


def check_parts_are_called(config: Any, names: Sequence[str], chunks: Sequence[torch.nn.Module]) -> None:
    """Reject names with a site inside a module whose submodules are replaced by fused operations.

    Args:
        config: the model's.
        names: names of the table.
        chunks: this rank's model chunks.

    Raises:
        ValueError: if there is such a site; names both settings and what can be offloaded instead.
    """
    for chunk in chunks:
        modules = dict(chunk.named_modules())
        for site in find_sites(chunk, drop_parts(names)[0]):
            owner = site.path.rpartition(".")[0]
            if calls_no_parts(modules[owner]):
                raise ValueError(_fused_message(config, site.name, owner, type(modules[owner]).__name__))


def check_weights_stay_whole(config: Any) -> None:
    """Reject weights that are re-gathered in backward through methods of the Parameter object.

    Saved tensors hooks return another tensor object, without these methods.

    Raises:
        NotImplementedError: if the setting is on; names it.
    """
    for name in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size"):
        if (getattr(config, name, None) or 1) > 1:
            raise NotImplementedError(
                f"offload_activation cannot be used with {name}={getattr(config, name)}: the backward of these layers "
                "calls methods of the saved Parameter object, which saved tensors hooks do not preserve. Set it to 1, "
                "or switch the offload off."
            )


def check_inputs_stay_whole(config: Any) -> None:
    """Reject full recomputation in a pipeline that keeps only a part of each layer's input.

    It truncates, in place, the tensor received from the previous stage and restores the tensor that autograd returns,
    which under saved tensors hooks is another object. Inputs inside a stage are not affected: they are not read again.

    Raises:
        NotImplementedError: if the setting is on; names it.
    """
    is_full = config.recompute_granularity == "full"
    if is_full and getattr(config, "distribute_saved_activations", False) and config.pipeline_model_parallel_size > 1:
        raise NotImplementedError(
            "offload_activation cannot be used with distribute_saved_activations=True in a pipeline: the input of a "
            "stage would stay truncated in backward. Switch distribute_saved_activations or the offload off."
        )


def check_host_limit(
    config: Any, limit_bytes: int | None, seq_length: int | None, micro_batch_size: int | None
) -> None:
    """Reject a host limit that cannot hold even the smallest useful group: one hidden activation.

    Without a limit, warn about host memory that megatron-core will take later, in an unknown amount.

    Raises:
        ValueError: if it cannot; names both sizes.
    """
    if limit_bytes is None:
        _warn_of_spilled_stash(config)
    if limit_bytes is None or not seq_length or not micro_batch_size:  # may be missing without a pipeline
        return
    need = hidden_bytes(config, seq_length, micro_batch_size)
    if limit_bytes < need:
        raise ValueError(
            f"offload_host_limit_bytes={limit_bytes:,} cannot hold one hidden activation of {need:,} bytes "
            f"(sequence {seq_length} x micro batch {micro_batch_size} x hidden {config.hidden_size}): nothing could "
            "be offloaded. Raise the limit."
        )


def _warn_of_spilled_stash(config: Any) -> None:
    factor = getattr(config, "moe_paged_stash_buffer_size_factor_cpu", 0.0)
    if factor and getattr(config, "moe_paged_stash", False):
        logger.warning(
            "moe_paged_stash_buffer_size_factor_cpu=%g pins host memory after the first step, when offload has taken "
            "what it needs: give offload_host_limit_bytes (--offload-host-limit-bytes), to leave room for both",
            factor,
        )


def hidden_bytes(config: Any, seq_length: int, micro_batch_size: int) -> int:
    """Return the bytes of one [sequence, batch, hidden] activation on this rank."""
    tokens = seq_length * micro_batch_size // getattr(config, "context_parallel_size", 1)
    if config.sequence_parallel:
        tokens //= config.tensor_model_parallel_size
    dtype = torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else torch.float32
    return tokens * int(config.hidden_size) * dtype.itemsize


def check_model(
    chunks: Sequence[torch.nn.Module],
    names: Sequence[str],
    config: Any,
    problem: str | None,
    pp: Any,
    *,
    has_budget: bool = False,
    thresholds: Thresholds = Thresholds(),  # noqa: B008  # immutable
) -> None:
    """Reject names that match nothing anywhere in the model. Collective over the pipeline-parallel group.

    Args:
        chunks: this rank's model chunks.
        names: names of the table.
        config: the model's.
        problem: error of this rank, if any; makes every rank raise, so that none waits for ever.
        pp: the pipeline-parallel process group.
        has_budget: a budget decides what this rank offloads.
        thresholds: least sizes of what each name moves.

    Raises:
        ValueError: if a name matches nothing, or has a least size but no groups; the same on every rank, and lists what
            the model has. Also if only some ranks have a budget: they would wait for the others.
    """
    report = _Report(
        None if problem else survey(chunks), problem, tuple(names), has_budget=has_budget, thresholds=thresholds
    )
    _check_reports(_gather(report, pp), config)


def is_on_elsewhere(chunks: Sequence[torch.nn.Module], config: Any, pp: Any) -> bool:
    """Take part in `check_model` from a rank that offloads nothing; return whether another rank offloads.

    Args:
        chunks: this rank's model chunks.
        config: of the model.
        pp: the pipeline-parallel process group.

    Raises:
        ValueError: as on the ranks that offload.
    """
    reports = _gather(_Report(survey(chunks)), pp)
    _check_reports(reports, config)
    return any(report.names for report in reports)


def _check_reports(reports: Sequence[_Report], config: Any) -> None:
    _raise_problems(reports)
    without = [rank for rank, report in enumerate(reports) if not report.has_budget]
    if 0 < len(without) < len(reports):
        raise ValueError(
            f"offload_gpu_budget is set on some ranks of the pipeline, but not on {', '.join(map(str, without))}: set "
            "it on all of them, or on none"
        )
    model = merge_surveys(report.survey for report in reports if report.survey is not None)
    names = dict.fromkeys(name for report in reports for name in report.names)
    check_names(tuple(names), model, config)
    for report in reports:
        report.thresholds.check(tuple(names))


def check_names(names: Sequence[str], model: Survey, config: Any) -> None:
    """Reject names that match nothing.

    Args:
        names: names to offload.
        model: survey of all stages.
        config: the model's.

    Raises:
        ValueError: if one does; lists what the model has.
    """
    missing = [name for name in names if not model.sites[name] and not _is_checkpoint_input(config, name)]
    if missing:
        raise ValueError(_missing_message(missing, model))


def check_host_room(stats: IterationStats | None, limit_bytes: int | None, pp: Any) -> bool:
    """Reject a host tier too small for any group of a step. Collective over the pipeline-parallel group.

    Called after the first step, when the sizes of groups are known and the optimizer has not used the gradients yet.

    Args:
        stats: counters of the step; None: this rank offloads nothing.
        limit_bytes: limit of the host tier, if there is one.
        pp: the pipeline-parallel process group.

    Returns:
        Whether a rank of the group has moved anything in that step.

    Raises:
        ValueError: if no group found room; the same on every rank, and names both sizes.
    """
    problem = None
    if stats is not None and stats.num_host_limit_groups and not stats.num_offloaded_groups:
        tier = "the host tier" if limit_bytes is None else f"offload_host_limit_bytes={limit_bytes:,}"
        problem = (
            f"{tier} has no room for any of {counted(stats.num_host_limit_groups, 'group')} of the first step, of "
            f"{stats.managed_bytes // stats.num_groups:,} bytes on average: nothing was offloaded. Raise "
            "offload_host_limit_bytes, free host memory, or switch offload_activation off"
        )
    reports = _gather(_Report(problem=problem, has_moved=stats is not None and stats.copied_out_bytes > 0), pp)
    _raise_problems(reports)
    return any(report.has_moved for report in reports)


def why_nothing_moved(stats: IterationStats, config: OffloadConfig) -> str | None:
    """Return why a step with groups moved nothing, and how to fix it; None if no known reason applies.

    Args:
        stats: counters of the step.
        config: configuration of its engine.
    """
    if not stats.num_groups or config.dry_run or isinstance(config.policy, ResidentBudget):
        return None
    if not stats.managed_bytes:
        return (
            "the offloaded modules saved no tensor of at least "
            f"offload_min_tensor_bytes={config.min_tensor_bytes:,}, or other saved tensors hooks inside them took "
            "it. Lower the threshold, or disable the feature that installs those hooks"
        )
    if stats.num_kept_groups == stats.num_groups:
        return "its only groups are the last of their names: their backward comes at once, before a copy could return"
    return None


def _raise_problems(reports: Sequence[_Report]) -> None:
    problems = [f"pipeline rank {rank}: {report.problem}" for rank, report in enumerate(reports) if report.problem]
    if problems:
        raise ValueError("; ".join(problems))


def _gather(own: _Report, pp: Any) -> list[_Report]:
    if pp is None or pp.size() == 1:
        return [own]
    gathered: list[Any] = [None] * pp.size()
    torch.distributed.all_gather_object(gathered, own, group=pp)
    return gathered


def _is_checkpoint_input(config: Any, name: str) -> bool:
    return name == "layer_input" and config.recompute_granularity == "full"


def _missing_message(missing: Sequence[str], model: Survey) -> str:
    has = [name for name, count in model.sites.items() if count]
    why = "; ".join(f"{name!r} {_why_missing(row_of(name), model)}" for name in missing)
    return (
        f"offload_modules matches nothing in this model: {why}. This model has {', '.join(has) or 'no known module'} "
        f"(layers made of {', '.join(sorted(model.classes)) or 'nothing'}){_other_names(missing)}"
    )


def _other_names(names: Sequence[str]) -> str:
    """Return a note on the aliases of `names`, because the user may have given one of them."""
    aliases = [f"{alias!r} stands for {name!r}" for name in names for alias in row_of(name).aliases]
    return f" ({'; '.join(aliases)})" if aliases else ""


def _fused_message(config: Any, name: str, path: str, class_name: str) -> str:
    whole = whole_of(path)
    instead = f"offload {whole!r}, " if whole and not _shared_experts_conflict(config, whole) else ""
    setting = "use_grouped_gemm_for_shared_expert" if whole == "shared_experts" else "use_transformer_engine_op_fuser"
    return (
        f"offload_modules has {name!r}, but {setting}=True runs {path} ({class_name}) as one operation of "
        f"TransformerEngine, which calls none of its submodules: {instead}omit the name, or switch {setting} off"
        f"{_other_names([name])}"
    )


def _why_missing(row: ModuleRow, model: Survey) -> str:
    if row.name in model.identities:
        fused = f": the norm is fused into the linear after it, use {row.instead!r}" if row.instead else ""
        return f"is an IdentityOp here{fused}"
    return f"needs {row.where}"


def _full_conflict(config: Any, name: str) -> str | None:
    if config.recompute_granularity != "full" or name == "layer_input":
        return None
    if config.recompute_method == "block" and _leaves_layers_out(config):
        return None
    return (
        "recompute_granularity='full' recomputes every layer, which saves only its input: offload 'layer_input', or "
        "use recompute_granularity='selective'"
    )


def _leaves_layers_out(config: Any) -> bool:
    """Return whether recompute_method="block" may skip a layer of some chunk; with uneven stages it may."""
    if any(getattr(config, name, None) for name in _UNEVEN_STAGES):
        return True
    num_chunks = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
    return bool(config.recompute_num_layers < config.num_layers // num_chunks)


def _selective_conflict(config: Any, row: ModuleRow, norms: frozenset[str]) -> str | None:
    if config.recompute_granularity != "selective":
        return None
    norm = BLOCKS.get(row.spans[0].path.partition(".")[0])
    for module in config.recompute_modules or ():
        if module in row.recomputed_by and module not in row.input_of:
            return (
                f"recompute_modules has {module!r}, which recomputes it: only the input of the recomputation can move. "
                f"{_input_of(module, norm)}"
            )
        if module in row.discarded_by and _discards_all(config, module, norm in norms):
            return (
                f"{module!r} in recompute_modules discards and recomputes what it saves: only the input of the "
                f"recomputation can move. {_input_of(module, norm)}"
            )
    return None


def _input_of(module: str, norm: str | None) -> str:
    """Return advice: the name that moves the input of what a value of `recompute_modules` recomputes."""
    rows = [row for row in MODULES if module in row.input_of and (module != "layernorm" or row.spans[0].path == norm)]
    names = [row.name for row in rows if not row.parts]
    return f"Offload {names[-1]!r}, or omit one of the two" if names else "Omit one of the two"


def _discards_all(config: Any, module: str, has_own_norm: bool) -> bool:
    """Return whether a value of `recompute_modules` leaves nothing to move for rows with it in `discarded_by`."""
    if module == "layernorm":  # a norm that is fused into the linear layer after it discards nothing
        return has_own_norm
    return module != "gdn_norm_out" or not _has_plain_attention(config)


def _has_plain_attention(config: Any) -> bool:
    """Return whether, by the configuration, some layer has attention other than GatedDeltaNet."""
    frequency = getattr(config, "linear_attention_freq", None)
    if getattr(config, "is_hybrid_model", False) or frequency is None:  # listed in another setting
        return True
    return frequency <= config.num_layers if isinstance(frequency, int) else not all(frequency)


def _norm_conflict(config: Any, row: ModuleRow) -> str | None:
    if not getattr(config, "fused_residual_rmsnorm", False) or row.spans[0].path not in BLOCKS.values():
        return None
    return (
        "fused_residual_rmsnorm=True runs this norm together with the residual connection before it, outside the "
        "module. Switch fused_residual_rmsnorm off, or omit the name"
    )


def _shared_experts_conflict(config: Any, name: str) -> str | None:
    if name != "shared_experts" or not getattr(config, "moe_shared_expert_overlap", False):
        return None
    return (
        "moe_shared_expert_overlap=True runs the parts of the shared experts separately, between the steps of the "
        "dispatcher, and never calls the whole: offload 'shared_fc1' and 'shared_fc2'"
    )
