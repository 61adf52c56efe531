# SPDX-License-Identifier: Apache-2.0
"""Models with code that is not megatron-core's: what it keeps stays readable, and what it packs is its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.utils.checkpoint import checkpoint

from megatron_patches import apply
from offload_engine import OffloadConfig
from tests.dist.launch import Pipeline, on_ranks
from tests.dist.settings import OVERLAP, SHARED
from tests.dist.tiny import ALL, NUM_LAYERS, forward_step, make_chunks, make_config, messages, run, step

Prepare = Callable[[Any], None]


def outcome(prepare: Prepare, names: list[str], config: Any = None, forward_step: Any = forward_step) -> Any:
    """Return losses and gradients of a second step with these modules offloaded, or none, and its counters.

    `prepare` changes the model.
    """
    chunks = make_chunks(config or make_config(), change=prepare)
    with apply(ALL, modules=names, has_report=False) as handle:
        found = [step(chunks, 2, forward_step=forward_step) for _ in range(2)]
        return found[-1], handle.stats


def moved_alike(prepare: Prepare, names: list[str], config: Any = None) -> Any:
    """Return the counters of a step that computes what it does without offload."""
    expected, _ = outcome(prepare, [], config)
    found, stats = outcome(prepare, names, config)
    assert found == expected
    return stats


# -- readers of what would be emptied ----------------------------------------------------------------------------------

_kept: list[torch.Tensor] = []  # of this rank, whose process ends with the test


def _behind_the_embedding(chunk: Any) -> None:
    chunk.embedding.register_forward_hook(lambda module, args, output: _kept.append(output))


def _in_front_of_the_decoder(chunk: Any) -> None:
    chunk.decoder.register_forward_pre_hook(
        lambda module, args, kwargs: _kept.append(kwargs["hidden_states"]), with_kwargs=True
    )


def _in_front_of_a_norm(chunk: Any) -> None:
    chunk.decoder.layers[0].input_layernorm.register_forward_pre_hook(lambda module, args: _kept.append(args[0]))


def _in_every_module(chunk: Any) -> None:
    def note(module: Any, args: Any, output: Any) -> None:
        if module is chunk.embedding:
            _kept.append(output)

    torch.nn.modules.module.register_module_forward_hook(note)


def _in_a_layer(chunk: Any) -> None:
    class Keeping(TransformerLayer):
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            _kept.append(hidden_states)
            return super().forward(hidden_states, *args, **kwargs)

    chunk.decoder.layers[0].__class__ = Keeping


def _in_a_decoder(chunk: Any) -> None:
    class Keeping(type(chunk.decoder)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().forward(hidden_states, *args, **kwargs) + 0.1 * hidden_states.sigmoid()

    chunk.decoder.__class__ = Keeping


def _reading_later(batches: Iterator[torch.Tensor], model: Any, *more: Any) -> Any:
    _kept.clear()
    output, loss = forward_step(batches, model, *more)

    def with_penalty(output: torch.Tensor) -> Any:
        value, _ = loss(output)
        value = value + sum(tensor.float().pow(2).mean() for tensor in _kept)
        return value, {"loss": value.detach()}

    return output, with_penalty


READERS = (_behind_the_embedding, _in_front_of_the_decoder, _in_front_of_a_norm, _in_a_layer, _in_a_decoder)


@on_ranks()
def test_layer_input_kept_by_other_code_stays_readable() -> None:
    for prepare in (*READERS, _in_every_module):  # the last leaves its hook behind
        expected, _ = outcome(prepare, [], forward_step=_reading_later)
        for name in ("layer_input", "attn_norm"):
            found, stats = outcome(prepare, [name], forward_step=_reading_later)
            assert stats.copied_in_bytes > 0 and stats.num_emptied_storages == 0, prepare
            assert found == expected, prepare


@pytest.mark.compat
@on_ranks()
def test_without_other_code_it_is_emptied() -> None:
    def look(number: int, *args: Any) -> None:
        """As megatron-core's hooks, some of which are partial functions."""

    def prepare(chunk: Any) -> None:
        chunk.decoder.register_forward_hook(partial(look, 1))

    for module, num_emptied in (("tests", 0), ("megatron.core.tests", 2)):
        look.__module__ = module
        assert outcome(prepare, ["layer_input"])[1].num_emptied_storages == num_emptied


@pytest.mark.compat
@pytest.mark.parametrize("is_given", [False, True], ids=["kept by a hook", "given by the caller"])
@on_ranks(Pipeline(expert=2))
def test_under_the_overlap_other_code_may_read_it_too(is_given: bool) -> None:
    seen: list[float] = []

    def reading(batches: Iterator[torch.Tensor], model: Any, *args: Any, **kwargs: Any) -> Any:
        with _embeddings_given() if is_given else nullcontext():
            output, loss = forward_step(batches, model, *args, **kwargs)

        def with_look(output: torch.Tensor) -> Any:
            seen.append(_kept.pop(0).detach().float().sum().item())
            return loss(output)

        return output, with_look

    outcomes, config = [], make_config("moe", torch.bfloat16, **OVERLAP)
    for names in (["layer_input"], []):
        seen.clear()
        _kept.clear()
        prepare = (lambda chunk: None) if is_given else _behind_the_embedding
        outcomes.append((outcome(prepare, names, config, reading)[0], seen[:]))
    assert outcomes[0] == outcomes[1]


@contextmanager
def _embeddings_given() -> Iterator[None]:
    """Plans are built as by a script that makes the embeddings, and keeps them."""
    build = GPTModel.build_schedule_plan

    def build_with(model: Any, tokens: torch.Tensor, positions: torch.Tensor, mask: Any, **kwargs: Any) -> Any:
        _kept.append(model.embedding(tokens, positions))
        return build(model, tokens, positions, mask, decoder_input=_kept[-1], **kwargs)

    with mock.patch.object(GPTModel, "build_schedule_plan", build_with):
        yield


# -- hooks and modules of others ---------------------------------------------------------------------------------------


@on_ranks()
def test_recomputation_of_torchs_checkpoint_is_left_alone() -> None:
    """Of equal shapes, so that nothing but the numbers would tell if it took one tensor for another."""

    def checkpoint_each_mlp(chunk: Any) -> None:
        for layer in chunk.decoder.layers:
            own = layer.mlp.forward
            layer.mlp.forward = lambda *args, own=own, **kwargs: checkpoint(own, *args, use_reentrant=False, **kwargs)

    config = make_config(ffn_hidden_size=32, add_bias_linear=False, activation_func=torch.nn.Identity())
    logged = messages()
    stats = moved_alike(checkpoint_each_mlp, ["core_attn", "mlp_fc1"], config)
    assert stats.num_groups == 2 * NUM_LAYERS  # of core_attn, in two microbatches
    assert logged == ["offload of 'mlp_fc1': the model has its submodules, but this step did not call them"]


@on_ranks()
def test_of_a_layer_that_is_called_several_times_the_last_call_stays() -> None:
    def share_all_layers(chunk: Any) -> None:
        layers = chunk.decoder.layers
        for index in range(1, len(layers)):
            layers[index] = layers[0]

    stats = moved_alike(share_all_layers, ["core_attn", "mlp_fc1"])
    assert (stats.num_groups, stats.num_kept_groups) == (2 * 2 * NUM_LAYERS, 2 * 2)  # two microbatches, two names


@on_ranks()
def test_a_module_that_returns_its_input_changes_no_bit() -> None:
    """A mark behind it would add up the gradients of its readers before those of others come to it."""

    def replace_norms(chunk: Any) -> None:
        for layer in chunk.decoder.layers:
            layer.pre_mlp_layernorm = torch.nn.Identity()

    moved_alike(replace_norms, ["mlp_norm"], make_config("moe", **SHARED))


@on_ranks()
def test_a_wrapper_is_taken_off_only_as_far_as_there_is_a_configuration() -> None:
    """Inside this one is a module that has none."""
    (chunk,) = make_chunks(make_config())
    wrapper: Any = torch.nn.Module()
    wrapper.module = torch.nn.Linear(2, 2)
    for name in ("forward", "set_input_tensor", "config", "model_type"):
        setattr(wrapper, name, getattr(chunk, name))
    with apply(OffloadConfig()) as handle:
        assert run([wrapper], 2) and handle.stats is None


# -- offload on some ranks ---------------------------------------------------------------------------------------------


def _chunks_on(ranks: tuple[int, ...], name: str) -> list[torch.nn.Module]:
    """The model of this rank, which offloads on these ranks alone."""
    is_on = torch.distributed.get_rank() in ranks
    return make_chunks(make_config(**{"offload_activation": True, "offload_modules": [name]} if is_on else {}))


@on_ranks(Pipeline(2), timeout_s=60)
def test_offload_on_some_ranks_of_a_pipeline() -> None:
    """A name that matches nothing is an error on the others, too."""
    expected = step(_chunks_on((), ""), 4)
    for on in ((0,), (1,)):
        with apply(ALL) as handle:
            chunks = _chunks_on(on, "core_attn")
            assert [step(chunks, 4) for _ in range(2)] == [expected, expected]
            moved = 0 if handle.stats is None else handle.stats.copied_out_bytes
            assert (moved > 0) == (torch.distributed.get_rank() in on)
    with apply(ALL), pytest.raises(ValueError, match="matches nothing in this model: 'router_fc1'"):
        run(_chunks_on((0,), "router_fc1"), 4)
