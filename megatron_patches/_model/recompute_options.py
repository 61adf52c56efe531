# SPDX-License-Identifier: Apache-2.0
"""Offers recomputations in the layers of a model to a budget, with what they free and take, and switches them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megatron_patches._model.recompute import Switch, Switches, refusal_lines
from megatron_patches._model.sites import layers_of
from offload_engine.planning.choices import Choices, Slot, slots_of
from offload_engine.planning.recompute import RecomputeOption
from offload_engine.planning.shapes import GroupShape, Shapes

_DISCARDS_OUTPUT = ("input_layernorm", "pre_mlp_layernorm", "mla_up_proj", "moe_act")
"""The tensors that these free are saved after them, so only the groups of their inputs show how long they take."""
_OUTPUT_IS_SAVED = ("core_attn",)
"""Flash attention saves its output, which the next module saves as well."""
_OUTPUT_IS_MADE_AGAIN = ("mlp", "moe", "shared_experts")
"""Nothing saves what these return, but their recomputation holds it to its end."""

_ORDER = (
    "moe_act",
    "mlp",
    "moe",
    "shared_experts",
    "core_attn",
    "mla_up_proj",
    "input_layernorm",
    "pre_mlp_layernorm",
)
"""Those that free the most come first: next to one, a norm before it frees only its output. An activation of experts is
cheaper than the whole, which exchanges tokens again."""


BeginRun = Callable[[str], Callable[[Any], None]]


class Place(NamedTuple):
    """The groups of one name in a layer."""

    stage: int
    layer: int
    name: str


class _Option(NamedTuple):
    switch: Switch
    frees: frozenset[Place]
    keeps: frozenset[Place]

    @property
    def places(self) -> frozenset[Place]:
        return self.frees | self.keeps


class RecomputeOptions:
    """Offers the recomputations of one rank's model chunks, and switches on those that were chosen.

    Recomputations of the model's own configuration are neither offered nor switched off. It holds no module.

    Args:
        chunks: this rank's model chunks.
        names: names of the groups on them.
        begin_run: called with the name of a recomputation when what it is around begins; what it returns is called at
            the end, with the output.

    Attributes:
        refusals: recomputations that the layers have and that are not offered, with the reason: a line for each.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], names: Iterable[str], begin_run: BeginRun) -> None:
        switches, groups = Switches(chunks), frozenset(names)
        self.refusals: list[str] = refusal_lines(switches.refusals)
        ours = [(stage, switch) for (stage, _, _), switch in switches.by_key.items() if not switch.is_on]
        found = [_option(stage, switch, groups) for stage, switch in ours]
        self._options: list[_Option] = sorted(found, key=lambda option: _ORDER.index(option.switch.name))
        self._input_bytes: dict[tuple[int, int, str], int] = {}
        self._output_bytes: dict[tuple[int, int, str], int] = {}
        self._handles: list[Any] = []
        self._begin_run = begin_run
        for stage, chunk in enumerate(chunks):
            for layer, (_, module) in enumerate(layers_of(chunk)):
                self._measure_inputs(stage, layer, dict(module.named_modules()))

    def find(self, shapes: Shapes) -> tuple[RecomputeOption, ...]:
        """Return what can be recomputed instead of moved, with the bytes and times of groups. See `Decider`.

        Of overlapping recomputations the first in `_ORDER` is offered, the same on all ranks of a stage.
        """
        for handle in self._handles:
            handle.remove()
        groups = dict(_groups_of(shapes))
        offers = [offer for option in self._options if (offer := self._offer(option, groups)) is not None]
        taken: set[Slot] = set()
        found = []
        for option in offers:
            if taken.isdisjoint(option.replaces):
                taken |= option.replaces
                found.append(option)
        return tuple(option for option in found if option.freed_bytes)

    def apply(self, choices: Choices) -> None:
        """Switch on the chosen recomputations, and all other offered ones off, from the next step on.

        Raises:
            ValueError: if something was chosen that cannot be recomputed.
        """
        places = frozenset(Place(slot.stage, slot.layer, slot.name) for slot in choices.recomputed)
        chosen = {option.switch for layer in _by_layer(places) for option in self._find_chosen(layer)}
        for option in self._options:
            option.switch.set(option.switch in chosen)

    def restore(self) -> None:
        """Restore the recomputations with which the model was built. Idempotent."""
        for handle in self._handles:
            handle.remove()
        for option in self._options:
            option.switch.restore()

    def _find_chosen(self, places: frozenset[Place]) -> list[_Option]:
        """Return the options of one layer whose union was offered by `find` and chosen by a decision."""
        options = [option for option in self._options if option.places and option.places <= places]
        if (chosen := _cover(places, options)) is None:
            raise ValueError(
                f"the plan recomputes {min(places)}, which this model cannot switch: remove the plan's file"
            )
        return chosen

    def _measure_inputs(self, stage: int, layer: int, modules: Mapping[str, torch.nn.Module]) -> None:
        for option in self._options:
            if {(place.stage, place.layer) for place in option.places} != {(stage, layer)}:
                continue
            key, saves_output = (stage, layer, option.switch.name), option.switch.name in _OUTPUT_IS_SAVED

            def note(_: Any, args: Any, kwargs: Any, output: Any, key: Any = key, both: bool = saves_output) -> None:
                if torch.is_grad_enabled():  # an evaluation saves nothing
                    outputs = output if isinstance(output, tuple) else (output,)
                    self._output_bytes[key] = _bytes_of(outputs)
                    self._input_bytes[key] = _bytes_of([*args, *kwargs.values(), *(outputs if both else ())])

            module = modules[option.switch.around]
            self._handles.append(module.register_forward_hook(note, with_kwargs=True))
            if option.switch.name not in _DISCARDS_OUTPUT:
                self._note_runs(option.switch.name, module)

    def _note_runs(self, name: str, module: torch.nn.Module) -> None:
        ends: list[Callable[[Any], None]] = []  # of the run that has begun

        def before(*_: Any) -> None:
            ends[:] = [self._begin_run(name)]

        def after(module: Any, args: Any, output: Any) -> None:
            if ends:
                ends.pop()(output)

        self._handles += (module.register_forward_pre_hook(before), module.register_forward_hook(after))

    def _offer(self, option: _Option, groups: Mapping[Place, list[tuple[Slot, GroupShape]]]) -> RecomputeOption | None:
        """Return the bytes and the time of an option; None without a group of its own."""
        name, places = option.switch.name, option.places
        timed = option.keeps if name in _DISCARDS_OUTPUT else places
        milliseconds = sum(group.forward_ms for place in timed for _, group in groups.get(place, ()))
        nbytes = sum(group.nbytes for place in option.frees for _, group in groups.get(place, ()))
        if not nbytes or not milliseconds or any(place not in groups for place in option.frees):
            return None
        freed = nbytes
        [(stage, layer)] = {(place.stage, place.layer) for place in places}
        if option.frees & option.keeps:  # only the input of these stays
            freed -= self._input_bytes.get((stage, layer, name), freed)
        slots = frozenset(slot for place in places for slot, _ in groups.get(place, ()))
        if name in _DISCARDS_OUTPUT:  # what is freed is the output
            return RecomputeOption(name, slots, max(0, freed), milliseconds, False, max(0, freed))
        again = self._output_bytes.get((stage, layer, name), 0) if name in _OUTPUT_IS_MADE_AGAIN else 0
        return RecomputeOption(name, slots, max(0, freed), milliseconds, output_bytes=again)


def _option(stage: int, switch: Switch, groups: frozenset[str]) -> _Option:
    frees, keeps = (
        frozenset(Place(stage, switch.layer, name) for name in names if name in groups)
        for names in (switch.frees, switch.keeps)
    )
    return _Option(switch, frees, keeps)


def _by_layer(places: Iterable[Place]) -> list[frozenset[Place]]:
    found: dict[tuple[int, int], set[Place]] = {}
    for place in places:
        found.setdefault((place.stage, place.layer), set()).add(place)
    return [frozenset(layer) for layer in found.values()]


def _cover(places: frozenset[Place], options: Sequence[_Option]) -> list[_Option] | None:
    """Return options that cover exactly these places, each once; the first such options in the order of `find`.

    Not the largest option: an activation of experts and the shared experts may cover all the places of a MoE layer.
    """
    if not places:
        return []
    for number, option in enumerate(options, 1):
        if option.places <= places and (rest := _cover(places - option.places, options[number:])) is not None:
            return [option, *rest]
    return None


def _groups_of(shapes: Shapes) -> Iterator[tuple[Place, list[tuple[Slot, GroupShape]]]]:
    for stage, shape in enumerate(shapes):
        found: dict[Place, list[tuple[Slot, GroupShape]]] = {}
        for slot, group in zip(slots_of(stage, shape.groups), shape.groups, strict=True):
            found.setdefault(Place(stage, slot.layer, slot.name), []).append((slot, group))
        yield from found.items()


def _bytes_of(values: Iterable[Any]) -> int:
    """Return the bytes that autograd may save of these values. A mask has no gradient, and exists in any case."""
    tensors = [each for each in values if isinstance(each, torch.Tensor) and each.requires_grad]
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())
