# SPDX-License-Identifier: Apache-2.0
"""`ModelRuntime`: owns one engine for each model in training, and the running training step."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_patches._arguments import Settings, has_report, resolve
from megatron_patches._budget_log import BudgetLog
from megatron_patches._captures import Captures
from megatron_patches._hooks.attach import Attachment
from megatron_patches._hooks.bracket import GroupBracket
from megatron_patches._model.candidates import check_plan, find_among, find_candidates
from megatron_patches._model.fsdp import gathered_weights
from megatron_patches._model.gpu_budget import budget_of
from megatron_patches._model.graphs import check_cuda_graphs, may_be_recorded
from megatron_patches._model.host_claims import HostClaims
from megatron_patches._model.modules import drop_parts
from megatron_patches._model.peers import Peers
from megatron_patches._model.recompute_options import RecomputeOptions
from megatron_patches._model.sites import overlaps_expert_comm, own_norms
from megatron_patches._model.validate import (
    check_conflicts,
    check_host_limit,
    check_host_room,
    check_inputs_stay_whole,
    check_model,
    check_parts_are_called,
    check_weights_stay_whole,
    is_on_elsewhere,
    why_nothing_moved,
)
from megatron_patches._model.whole_steps import release_captured
from megatron_patches._plan_files import PlanFiles, described
from megatron_patches._rows.runtime import Step
from megatron_patches._second_step import SecondStep
from megatron_patches._training_log import TrainingLog
from offload_engine import BudgetError, OffloadEngine, OffloadError, ResidencyMeter
from offload_engine.rank_reports import BudgetReports, RankReports

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Attached:
    """The attachment of one model."""

    attachment: Attachment
    settings: Settings
    """The settings that the attachment was made for."""

    modules: Sequence[str]
    """The names that are offloaded: those of the settings, or what was found where these name none."""

    closer: weakref.finalize[..., Any]
    """Closes everything attached, at the latest when the model is freed, and keeps it alive until then."""

    followers: Sequence[Follower]
    is_checked: bool = False
    """The host tier had room in the first step that did not raise."""

    def close(self) -> None:
        """Release captures, then close the attachment. Idempotent."""
        self.closer()


class Follower(Protocol):
    """Reports on the steps of one model."""

    def after_step(self, engine: OffloadEngine) -> None:
        """Note a step that has not raised."""

    def close(self, engine: OffloadEngine) -> None:
        """Report what is left, before the engine closes."""


def _close(attachment: Attachment, followers: Sequence[Follower], recomputation: RecomputeOptions | None) -> None:
    try:
        for follower in followers:
            follower.close(attachment.engine)
    finally:
        if recomputation is not None:
            recomputation.restore()
        attachment.close()


class _Reports:
    """Makes what reports on each model about to train. All ranks train their models in the same order."""

    def __init__(self, defaults: Settings) -> None:
        self._defaults = defaults
        self._num_models = 0

    def of_second_step(self, step: Step, settings: Settings | None) -> SecondStep:
        """Make the `SecondStep` of the next model; without settings it offloads nothing on this rank."""
        self._num_models += 1
        reports = RankReports(self._name) if has_report(step.config, self._defaults) else None
        trace = None if settings is None else settings.trace
        return SecondStep(reports, trace, may_be_recorded(step.wrapped, step.config))

    def of_budget(self, step: Step) -> BudgetLog:
        """Make the `BudgetLog` of the same model."""
        return BudgetLog(
            BudgetReports(self._name, _place(step)[0]) if has_report(step.config, self._defaults) else None
        )

    @property
    def _name(self) -> str:
        return f"model{self._num_models}"


@dataclass
class _Off:
    """A model without offload on this rank."""

    second_step: SecondStep
    is_checked: bool
    """No check after the first step, on any rank of the pipeline, still waits for this rank."""


class _WithoutOffload:
    """Takes part, on a rank that offloads nothing of a model, in the collectives of the ranks that offload."""

    def __init__(self, reports: _Reports, is_taken_over: bool) -> None:
        self._reports = reports
        self._is_taken_over = is_taken_over
        # By the first chunk of the model.
        self._known: weakref.WeakKeyDictionary[torch.nn.Module, _Off] = weakref.WeakKeyDictionary()

    def step(self, step: Step) -> AbstractContextManager[object] | None:
        """Return a context manager for one training step; None once nothing is left to do.

        The first step has the collective checks of the other ranks; in the second this rank may have to log their
        records.
        """
        off = self._known.get(step.chunks[0]) or self._meet(step)
        return None if off.is_checked and off.second_step.is_over else self._running_step(off, step)

    def _meet(self, step: Step) -> _Off:
        if self._is_taken_over:
            logger.warning(
                "offload_engine found nothing to take over: the configuration of this model asks for none of "
                "megatron-core's own offload, or was made before the patches were applied"
            )
        is_on = is_on_elsewhere(step.chunks, step.config, step.pipeline)
        self._known[step.chunks[0]] = off = _Off(self._reports.of_second_step(step, None), is_checked=not is_on)
        return off

    @contextmanager
    def _running_step(self, off: _Off, step: Step) -> Iterator[None]:
        yield
        if not off.is_checked:
            try:
                check_host_room(None, None, step.pipeline)
            except ValueError:
                del self._known[step.chunks[0]]  # the other ranks, too, repeat their first step
                raise
            off.is_checked = True
        off.second_step.after_step(None)


class ModelRuntime:
    """Owns the engines of the models that train; implements `Runtime` for the rows.

    Args:
        defaults: used if the configuration of a model sets nothing.
        meter: counts resident bytes; None: each engine has its own.
    """

    def __init__(self, defaults: Settings, meter: ResidencyMeter | None) -> None:
        self._defaults: Settings = defaults
        self._meter: ResidencyMeter | None = meter
        # By the first chunk of the model, weakly: an attachment is freed with its model.
        self._attachments: weakref.WeakKeyDictionary[torch.nn.Module, _Attached] = weakref.WeakKeyDictionary()
        self._reports = _Reports(defaults)
        self._without_offload = _WithoutOffload(self._reports, defaults.is_taken_over)
        self._is_closed = False
        self.mistake: Exception | None = None  # of the user: the last error that refused settings or a model
        self._training_log = TrainingLog(lambda: self.latest_engine)
        self.host_claims: HostClaims = HostClaims()
        self._running: Attachment | None = None
        self.captures: Captures = Captures(self._attachments, self._set_running)
        self._latest: weakref.ref[Attachment] | None = None

    def _set_running(self, attachment: Attachment | None) -> None:
        self._running = attachment

    @property
    def latest_engine(self) -> OffloadEngine | None:
        """Return the engine of the model that trained last; None before the first step and after the model is freed."""
        attachment = self._latest() if self._latest is not None else None
        return attachment.engine if attachment is not None else None

    def close(self) -> None:
        """Remove every hook and close the engines; steps that follow run as without it. Idempotent.

        Raises:
            OffloadError: if megatron-core still has the graph of a captured step; nothing is closed then.
        """
        for attached in list(self._attachments.values()):
            release_captured(attached.attachment.engine)
        self._is_closed = True
        self._training_log.remove()
        self.detach_all()

    def abandon(self) -> None:
        """Leave all as it is, also when the process ends: a device may wait for ever for ranks that have failed."""
        for attached in self._attachments.values():
            attached.closer.detach()
            attached.attachment.engine.device.abandon()

    def detach_all(self) -> None:
        """Remove the hooks and close the engines of all models; their next steps attach again."""
        while self._attachments:
            self._attachments.popitem()[1].close()
        self._running = None

    # -- called by the rows -------------------------------------------------------------------------------------------

    @property
    def running_engine(self) -> OffloadEngine | None:
        """Return the engine of the running training step; None outside a step."""
        return self._running.engine if self._running is not None else None

    @property
    def active_engine(self) -> OffloadEngine | None:
        """Return the engine of the running step if groups may be opened now, otherwise None."""
        running = self._running
        return running.engine if running is not None and running.engine.is_active else None

    def record_recomputed_from(self, checkpoint: object, function: Callable[..., Any], tensors: Sequence[Any]) -> None:
        """Record that `checkpoint` has saved `tensors`, or detached copies, in the running step, to run `function`."""
        if self._running is not None:
            self._running.held.note_recomputed_from(tensors)
            self._running.recomputed.note(checkpoint, function, tensors)

    def offload_recomputed_from(self, checkpoint: object, recomputed_behind: torch.Tensor) -> None:
        """Offload what `checkpoint` has saved, if that was requested."""
        if self._running is not None:
            self._running.recomputed.offload(checkpoint, recomputed_behind)

    def note_gathered(self, weights: torch.Tensor) -> None:
        """Note the buffer that weights are gathered into now, in or outside a training step: it never moves."""
        for attached in self._attachments.values():
            attached.attachment.engine.exclude(weights, for_good=True)

    def checkpoint_bracket(self, function: Any) -> GroupBracket | None:
        """Return the bracket for the input of what `function` recomputes; None if the running step has none."""
        if self._running is None:
            return None
        return self._running.checkpoint_bracket or self._running.recomputed.of_checkpoint(function)

    def start_plan(self, model: torch.nn.Module, is_input_of_others: bool) -> None:
        """Begin the forward of the chunk `model` as a plan of nodes."""
        if self._running is not None:
            self._running.nodes.start_plan(is_input_of_others)
            self._running.start_chunk(getattr(model, "vp_stage", None) or 0)

    def run_node(self, node: Any, forward: Callable[..., Any], *inputs: Any) -> Any:
        """Run the forward of one node of a plan; return its outputs."""
        return forward(*inputs) if self._running is None else self._running.nodes.run(node, forward, *inputs)

    def step(self, step: Step) -> AbstractContextManager[object] | None:
        """Return a context manager for one training step; None if nothing is to be offloaded.

        Raises:
            ValueError, NotImplementedError: if the model does not support the settings, before its first step; or if
                the host tier had no room for any group, when the context of the first step ends.
        """
        if self._is_closed:
            return None
        self._training_log.attach(step.pipeline)
        settings = resolve(step.config, self._defaults)
        attached = self._attachments.get(step.chunks[0])
        if attached is not None and attached.settings != settings:  # the configuration has changed
            self._detach(step)
            attached = None
        if settings is None:
            return self._without_offload.step(step)
        with self._noting_mistakes((ValueError, NotImplementedError, OSError)):
            attached = attached or self._attach(step, settings)
        self._latest = weakref.ref(attached.attachment)
        return self._running_step(attached, step)

    # -- private ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _running_step(self, attached: _Attached, step: Step) -> Iterator[None]:
        attachment, actions = attached.attachment, step.order(step.config)
        is_combined = overlaps_expert_comm(step.config)
        attachment.begin_iteration(actions, is_combined=is_combined)
        attachment.engine.pool.spare(self.host_claims.nbytes())
        outer, self._running = self._running, attachment  # a step of one model in a forward of another
        try:
            with (
                self._noting_mistakes(_refusals(attached.settings)),
                attachment.engine.iteration(actions, attachment.weights, is_combined=is_combined),
            ):
                with attachment.reset_after_errors():  # before the engine resets, which pops hooks
                    yield
        except BaseException:
            attachment.reset()
            raise
        finally:
            self._running = outer
            attachment.note_weights(step.chunks)
        if not attached.is_checked:
            with self._noting_mistakes((ValueError,)):
                self._check_first_step(attached, step)
        attachment.warn_of_unused_names()
        for follower in attached.followers:
            follower.after_step(attachment.engine)

    @contextmanager
    def _noting_mistakes(self, kinds: tuple[type[Exception], ...]) -> Iterator[None]:
        try:
            yield
        except kinds as error:
            self.mistake = error
            raise

    def _check_first_step(self, attached: _Attached, step: Step) -> None:
        stats, settings = attached.attachment.engine.stats, attached.settings
        try:
            has_moved = check_host_room(stats, settings.engine.host_limit_bytes, step.pipeline)
        except ValueError:
            self._detach(step)
            raise
        attached.is_checked = True
        if not has_moved and (reason := why_nothing_moved(stats, settings.engine)):
            logger.warning("offload_activation moved nothing in the first step: %s", reason)

    def _attach(self, step: Step, settings: Settings) -> _Attached:
        """Check a model and attach the hooks. Collective: every rank of its pipeline calls it, even with an error."""
        engine, files, saved, problem, asked = None, None, None, None, settings
        peers = Peers(step.stage, step.pipeline)
        try:
            model = described(step.config, step.seq_length, step.micro_batch_size)
            files = PlanFiles(settings.plan, settings.plan_plot, model)
            saved = files.read(settings.may_recompute)
            settings = _with_candidates(step, settings)
            if saved is not None:
                check_plan(files.source, saved.allowance.slots, step.chunks, settings.modules)
            engine = self._make_engine(step, settings)
        except Exception as error:
            problem = error
        try:
            _check_together(step, settings, problem, peers)
        except ValueError as error:
            if engine is not None:
                engine.close()
            raise (problem or error) from None
        assert engine is not None and files is not None
        with ExitStack() as on_error:
            on_error.callback(engine.close)
            recomputation = _join(engine, step, settings, peers)
            if recomputation is not None:
                on_error.callback(recomputation.restore)
            for weight in gathered_weights(step.wrapped):
                engine.exclude(weight, for_good=True)
            files.begin(engine, saved)
            attachment = _put_hooks(engine, step, settings)
            on_error.callback(attachment.close)
            second_step, budget_log = self._reports.of_second_step(step, settings), self._reports.of_budget(step)
            budget_log.begin(engine)
            followers = second_step, files, budget_log
            closer = weakref.finalize(step.chunks[0], _close, attachment, followers, recomputation)
            on_error.pop_all()
        attached = _Attached(attachment, asked, settings.modules, closer, followers)
        self._attachments[step.chunks[0]] = attached
        return attached

    def _detach(self, step: Step) -> None:
        release_captured(self._attachments[step.chunks[0]].attachment.engine)  # with a graph it stays attached
        self._latest = None
        self._attachments.pop(step.chunks[0]).close()

    def _make_engine(self, step: Step, settings: Settings) -> OffloadEngine:
        check_cuda_graphs(step.config, settings.modules, settings.gpu_budget is not None)
        check_conflicts(step.config, settings.modules, own_norms(step.chunks))
        check_parts_are_called(step.config, settings.modules, step.chunks)
        check_weights_stay_whole(step.config)
        check_inputs_stay_whole(step.config)
        check_host_limit(step.config, settings.engine.host_limit_bytes, step.seq_length, step.micro_batch_size)
        place = _place(step)
        config = settings.engine
        if settings.gpu_budget is not None:
            config = config.replace(gpu_budget=budget_of(settings.gpu_budget))
        if settings.rank_delta_bytes:
            config = config.replace(kept_bytes=place[0] * settings.rank_delta_bytes)
        return OffloadEngine(config, meter=self._meter, pipeline=place, logs_first_step=False)


def _place(step: Step) -> tuple[int, int]:
    """Return the rank of this process in its pipeline, and the number of ranks there."""
    return (0, 1) if step.pipeline is None else (step.pipeline.rank(), step.pipeline.size())


def _put_hooks(engine: OffloadEngine, step: Step, settings: Settings) -> Attachment:
    names, inside = drop_parts(settings.modules)
    if inside:
        logger.info("offload of %s is part of offload of %s", ", ".join(inside), ", ".join(names))
    per_checkpoint = None
    if "layer_input" in names and step.config.recompute_granularity == "full":
        is_uniform = step.config.recompute_method == "uniform"
        per_checkpoint = step.config.recompute_num_layers if is_uniform else 1
        # with recompute_method="block" the layers after the block save their own input
        names = tuple(name for name in names if name != "layer_input" or not is_uniform)
    return Attachment(
        engine,
        step.chunks,
        names,
        layers_per_checkpoint=per_checkpoint,
        num_layers=settings.num_layers,
        min_bytes=settings.thresholds.of_groups(),
    )


def _refusals(settings: Settings) -> tuple[type[Exception], ...]:
    """Return the errors that refuse a step for its settings: no room on the host, or within a budget."""
    return (OffloadError,) if settings.engine.host_policy == "error" else (BudgetError,)


def _join(engine: OffloadEngine, step: Step, settings: Settings, peers: Peers) -> RecomputeOptions | None:
    """Make a budget decide together with other ranks, also about recomputation. Collective."""
    if engine.budget is None:
        return None
    decider = engine.budget.decider
    decider.join(tuple if peers.is_alone else peers.largest_of_stage, peers.largest_of_all, _place(step))
    if not settings.may_recompute:
        return None
    recomputation = RecomputeOptions(step.chunks, drop_parts(settings.modules)[0], decider.runs.begin)
    decider.find_options, decider.apply = recomputation.find, recomputation.apply
    for refusal in recomputation.refusals:
        logger.info("a budget does not recompute %s", refusal)
    return recomputation


def _check_together(step: Step, settings: Settings, problem: Exception | None, peers: Peers) -> None:
    """Check a model, and end the attempt on every rank if one has a problem.

    Raises:
        ValueError: what is wrong, or that something is on another rank.
    """
    has_budget = settings.gpu_budget is not None
    text = None if problem is None else f"{problem}"
    try:
        check_model(
            step.chunks,
            settings.modules,
            step.config,
            text,
            step.pipeline,
            has_budget=has_budget,
            thresholds=settings.thresholds,
        )
    except ValueError:
        if has_budget:
            peers.largest_of_stage((1,))
        raise
    if has_budget and peers.largest_of_stage((0,)) != (0,):
        raise ValueError("--offload-gpu-budget: another rank of this pipeline stage cannot begin; see its error")


def _with_candidates(step: Step, settings: Settings) -> Settings:
    """Return settings that name what this rank can offload: all, if they name nothing."""
    if settings.modules and not settings.is_taken_over:
        return settings
    has_budget = settings.gpu_budget is not None
    if settings.modules:
        names, left_out = find_among(step.config, step.chunks, settings.modules, has_budget)
    else:
        names, left_out = find_candidates(step.config, step.chunks, has_budget)
        what = "a budget chooses among" if has_budget else "what is offloaded is"
        logger.info("%s %s", what, ", ".join(names) or "nothing: this rank has no layer")
    for name, reason in left_out.items():
        logger.info("%r is left out: %s", name, reason)
    return settings._replace(modules=names)
