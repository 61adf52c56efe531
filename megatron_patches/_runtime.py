"""`ModelRuntime`: one engine for each model that trains, and the running training step."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from megatron_patches._arguments import Settings, resolve
from megatron_patches._hooks.attach import Attachment
from megatron_patches._hooks.bracket import GroupBracket
from megatron_patches._model.graphs import check_cuda_graphs
from megatron_patches._model.modules import drop_parts
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
from megatron_patches._rows.runtime import Step
from offload_engine import OffloadEngine, ResidencyMeter

logger = logging.getLogger(__name__)


class _Attached(NamedTuple):
    """The attachment of one model."""

    attachment: Attachment
    settings: Settings
    """That it was made for."""

    closer: weakref.finalize[..., Any]
    """Closes it when its model goes, and keeps it until then."""

    def close(self) -> None:
        self.attachment.close()
        self.closer.detach()


class ModelRuntime:
    """The engines of the models that train; implements `Runtime` for the rows.

    Args:
        defaults: for what the configuration of a model leaves open.
        meter: counts resident bytes; None: each engine has its own.
    """

    def __init__(self, defaults: Settings, meter: ResidencyMeter | None) -> None:
        self._defaults: Settings = defaults
        self._meter: ResidencyMeter | None = meter
        # By the first of a model's chunks: an attachment goes when its model does.
        self._attachments: weakref.WeakKeyDictionary[torch.nn.Module, _Attached] = weakref.WeakKeyDictionary()
        self._known_as_off: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # first chunks of models without
        self._running: Attachment | None = None
        self._latest: weakref.ref[Attachment] | None = None

    @property
    def latest_engine(self) -> OffloadEngine | None:
        """Engine of the model that took the last training step; None before the first, and once that is gone."""
        attachment = self._latest() if self._latest is not None else None
        return attachment.engine if attachment is not None else None

    def close(self) -> None:
        """Take every hook off and close the engines. Idempotent."""
        for attached in list(self._attachments.values()):
            attached.close()
        self._attachments.clear()
        self._running = None

    # -- what the rows report to --------------------------------------------------------------------------------------

    @property
    def running_engine(self) -> OffloadEngine | None:
        """The engine of the running step, else None."""
        return self._running.engine if self._running is not None else None

    @property
    def active_engine(self) -> OffloadEngine | None:
        """The engine of the running step where groups may be opened, else None."""
        running = self._running
        return running.engine if running is not None and running.engine.is_active else None

    def record_recomputed_from(self, tensors: Iterable[Any]) -> None:
        """`CheckpointWithoutOutput` has saved detached copies of `tensors`."""
        if self._running is not None:
            self._running.held.note_recomputed_from(tensors)

    def checkpoint_bracket(self) -> GroupBracket | None:
        """The bracket for the input of fully recomputed layers, if the running step has it."""
        return self._running.checkpoint_bracket if self._running is not None else None

    def start_plan(self, model: torch.nn.Module, is_input_of_others: bool) -> None:
        """The forward of a model chunk of the running step begins, as a plan of nodes."""
        if self._running is not None:
            self._running.nodes.start_plan(is_input_of_others)
            self._running.start_chunk(getattr(model, "vp_stage", None) or 0)

    def run_node(self, node: Any, forward: Callable[..., Any], *inputs: Any) -> Any:
        """Runs the forward of one node of a plan."""
        return forward(*inputs) if self._running is None else self._running.nodes.run(node, forward, *inputs)

    def step(self, step: Step) -> AbstractContextManager[object] | None:
        """A context for one training step; None if nothing is to be offloaded.

        Raises:
            ValueError, NotImplementedError: if the model cannot do what is asked, before its first training step; or,
                when the context of the first one ends, if the host tier had no room for any group.
        """
        settings = resolve(step.config, self._defaults)
        if settings is None:
            return self._first_step_without(step)
        attached = self._attachments.get(step.chunks[0])
        if attached is not None and attached.settings != settings:  # the configuration asks for something else now
            self._detach(step)
            attached = None
        is_first = attached is None
        attachment = attached.attachment if attached is not None else self._attach(step, settings)
        self._latest = weakref.ref(attachment)
        return self._running_step(attachment, step, settings if is_first else None)

    # -- private ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _running_step(self, attachment: Attachment, step: Step, to_check: Settings | None) -> Iterator[None]:
        actions = step.order(step.config)
        is_combined = overlaps_expert_comm(step.config)
        attachment.begin_iteration(actions, is_combined=is_combined)
        outer, self._running = self._running, attachment  # a step of one model in a forward of another
        try:
            with attachment.engine.iteration(actions, attachment.weights, is_combined=is_combined):
                yield
        except BaseException:
            attachment.abandon_iteration()
            raise
        finally:
            self._running = outer
            attachment.note_weights(step.chunks)
        if to_check is not None:
            self._check_first_step(attachment, step, to_check)
            if to_check.trace is not None:
                attachment.engine.record(to_check.trace)
        attachment.warn_of_unused_names()

    def _first_step_without(self, step: Step) -> AbstractContextManager[object] | None:
        """The other ranks of the pipeline may offload: they wait for this one to take part in their checks."""
        if step.chunks[0] in self._known_as_off:
            return None
        is_on = is_on_elsewhere(step.chunks, step.config, step.pipeline)
        self._known_as_off.add(step.chunks[0])
        return self._checked_with_others(step) if is_on else None

    @contextmanager
    def _checked_with_others(self, step: Step) -> Iterator[None]:
        yield
        try:
            check_host_room(None, None, step.pipeline)
        except ValueError:
            self._known_as_off.discard(step.chunks[0])  # they begin anew, too
            raise

    def _check_first_step(self, attachment: Attachment, step: Step, settings: Settings) -> None:
        stats = attachment.engine.stats
        try:
            has_moved = check_host_room(stats, settings.engine.host_limit_bytes, step.pipeline)
        except ValueError:
            self._detach(step)
            raise
        if not has_moved and (reason := why_nothing_moved(stats, settings.engine)):
            logger.warning("offload_activation has moved nothing in the first step: %s", reason)

    def _attach(self, step: Step, settings: Settings) -> Attachment:
        """Checks a model and puts the hooks on it. Every rank of its pipeline takes part, whatever it finds."""
        engine, problem = None, None
        try:
            engine = self._make_engine(step, settings)
        except Exception as error:
            problem = error
        try:
            text = f"{problem}" if problem is not None else None
            check_model(step.chunks, settings.modules, step.config, text, step.pipeline)
        except ValueError as error:
            if engine is not None:
                engine.close()
            raise (problem or error) from None
        assert engine is not None
        attachment = self._put_hooks(engine, step, settings)
        closer = weakref.finalize(step.chunks[0], attachment.close)
        self._attachments[step.chunks[0]] = _Attached(attachment, settings, closer)
        return attachment

    def _detach(self, step: Step) -> None:
        self._attachments.pop(step.chunks[0]).close()
        self._latest = None

    def _make_engine(self, step: Step, settings: Settings) -> OffloadEngine:
        check_cuda_graphs(step.config, settings.modules)
        check_conflicts(step.config, settings.modules, own_norms(step.chunks))
        check_parts_are_called(step.config, settings.modules, step.chunks)
        check_weights_stay_whole(step.config)
        check_inputs_stay_whole(step.config)
        check_host_limit(step.config, settings.engine.host_limit_bytes, step.seq_length, step.micro_batch_size)
        return OffloadEngine(settings.engine, meter=self._meter)

    def _put_hooks(self, engine: OffloadEngine, step: Step, settings: Settings) -> Attachment:
        names, inside = drop_parts(settings.modules)
        if inside:
            logger.info("offload of %s is part of offload of %s", ", ".join(inside), ", ".join(names))
        per_checkpoint = None
        if "layer_input" in names and step.config.recompute_granularity == "full":
            is_uniform = step.config.recompute_method == "uniform"
            per_checkpoint = step.config.recompute_num_layers if is_uniform else 1
            # where only a block of layers is recomputed, those behind it save their input themselves
            names = tuple(name for name in names if name != "layer_input" or not is_uniform)
        return Attachment(engine, step.chunks, names, layers_per_checkpoint=per_checkpoint)
