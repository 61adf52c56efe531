# SPDX-License-Identifier: Apache-2.0
"""Models with code that is not megatron-core's: what it keeps stays readable, and what it packs is its own."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("megatron.core")

import torch  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from megatron_patches import Handle, apply  # noqa: E402
from offload_engine import OffloadConfig  # noqa: E402
from offload_engine._host.pool import HostPool  # noqa: E402
from tests.dist.launch import Pipeline, run_ranks  # noqa: E402
from tests.dist.logged import messages  # noqa: E402
from tests.dist.tiny import NUM_LAYERS, fingerprint, forward_step, make_chunks, make_config, run  # noqa: E402

Prepare = Callable[[torch.nn.Module], None]


class Outcome:
    """Losses and gradients of two steps with these modules offloaded, or none, of a model that `prepare` changes."""

    def __init__(self, prepare: Prepare, names: list[str], kind: str = "dense", step: Any = forward_step, **more: Any):
        (chunk,) = chunks = make_chunks(make_config(kind, **more))
        prepare(chunk)
        with apply(OffloadConfig(min_tensor_bytes=1, directory="none"), modules=names) as handle:
            for _ in range(2):
                chunk.zero_grad()
                losses = run(chunks, 2, forward_step=step)
            self.fingerprint = fingerprint(chunks, losses)
            self.stats: Any = handle.stats


# -- readers of what would be emptied ----------------------------------------------------------------------------------

_kept: list[torch.Tensor] = []  # of this rank, whose process ends with the test


def _keep_behind_the_embedding(chunk: Any) -> None:
    chunk.embedding.register_forward_hook(lambda module, args, output: _kept.append(output))


def _keep_in_front_of_the_decoder(chunk: Any) -> None:
    chunk.decoder.register_forward_pre_hook(lambda module, args, kwargs: _keep(kwargs), with_kwargs=True)


def _keep_in_front_of_a_norm(chunk: Any) -> None:
    chunk.decoder.layers[0].input_layernorm.register_forward_pre_hook(lambda module, args: _kept.append(args[0]))


def _keep_in_every_module(chunk: Any) -> None:
    def note(module: Any, args: Any, output: Any) -> None:
        if module is chunk.embedding:
            _kept.append(output)

    torch.nn.modules.module.register_module_forward_hook(note)


def _keep_in_a_layer(chunk: Any) -> None:
    class Keeping(TransformerLayer):
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.layer_number == 1:
                _kept.append(hidden_states)
            return super().forward(hidden_states, *args, **kwargs)

    chunk.decoder.layers[0].__class__ = Keeping


def _keep_in_a_decoder(chunk: Any) -> None:
    class Keeping(type(chunk.decoder)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().forward(hidden_states, *args, **kwargs) + 0.1 * hidden_states.sigmoid()

    chunk.decoder.__class__ = Keeping


def _keep(kwargs: dict[str, Any]) -> None:
    _kept.append(kwargs["hidden_states"])


def _reading_later(batches: Iterator[torch.Tensor], model: Any, *more: Any) -> Any:
    _kept.clear()
    output, loss = forward_step(batches, model, *more)

    def with_penalty(output: torch.Tensor) -> Any:
        value, _ = loss(output)
        value = value + sum(tensor.float().pow(2).mean() for tensor in _kept)
        return value, {"loss": value.detach()}

    return output, with_penalty


READERS = (
    _keep_behind_the_embedding,
    _keep_in_front_of_the_decoder,
    _keep_in_front_of_a_norm,
    _keep_in_every_module,
    _keep_in_a_layer,
    _keep_in_a_decoder,
)


@pytest.mark.parametrize("prepare", READERS, ids=lambda reader: reader.__name__.strip("_"))
def test_layer_input_kept_by_other_code_stays_readable(prepare: Prepare) -> None:
    run_ranks(_check_reader, prepare)


def _check_reader(prepare: Prepare) -> None:
    for names in (["layer_input"], ["attn_norm"]):
        found = Outcome(prepare, names, step=_reading_later)
        assert found.stats.copied_in_bytes > 0 and found.stats.num_emptied_storages == 0
        assert found.fingerprint == Outcome(prepare, [], step=_reading_later).fingerprint


def test_without_other_code_it_is_emptied() -> None:
    run_ranks(_check_no_reader)


def _check_no_reader() -> None:
    def look(number: int, *args: Any) -> None:
        """As megatron-core's hooks, some of which are partial functions."""

    def prepare(chunk: Any) -> None:
        chunk.decoder.register_forward_hook(partial(look, 1))

    assert Outcome(prepare, ["layer_input"]).stats.num_emptied_storages == 0
    look.__module__ = "megatron.core.tests"
    assert Outcome(prepare, ["layer_input"]).stats.num_emptied_storages == 2


@pytest.mark.parametrize("is_given", [False, True], ids=["kept by a hook", "given by the caller"])
def test_under_the_overlap_other_code_may_read_it_too(is_given: bool) -> None:
    pytest.importorskip("torch", minversion="2.6", reason="megatron-core's overlap needs it")
    run_ranks(_check_overlap, is_given, pipeline=Pipeline(expert=2))


def _check_overlap(is_given: bool) -> None:
    settings = {"overlap_moe_expert_parallel_comm": True, "expert_model_parallel_size": 2, "dtype": torch.bfloat16}
    seen: list[float] = []

    def reading(batches: Iterator[torch.Tensor], model: Any, *args: Any, **kwargs: Any) -> Any:
        with _embeddings_given() if is_given else nullcontext():
            output, loss = forward_step(batches, model, *args, **kwargs)

        def with_look(output: torch.Tensor) -> Any:
            seen.append(_kept.pop(0).detach().float().sum().item())
            return loss(output)

        return output, with_look

    outcomes = []
    for names in (["layer_input"], []):
        seen.clear()
        _kept.clear()
        prepare = _do_nothing if is_given else _keep_behind_the_embedding
        outcomes.append((Outcome(prepare, names, "moe", reading, **settings).fingerprint, seen[:]))
    assert outcomes[0] == outcomes[1]


def _do_nothing(chunk: Any) -> None: ...


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


def _checkpoint_each_mlp(chunk: Any) -> None:
    for layer in chunk.decoder.layers:
        own = layer.mlp.forward
        layer.mlp.forward = lambda *args, own=own, **kwargs: checkpoint(own, *args, use_reentrant=False, **kwargs)


def test_recomputation_of_torchs_checkpoint_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Of equal shapes, so that nothing but the numbers would tell if it took one tensor for another."""
    (warnings,) = run_ranks(_check_checkpoint)
    assert warnings == ["offload of 'mlp_fc1': the model has its submodules, but this step did not call them"]


def _check_checkpoint() -> list[str]:
    settings: Any = {"ffn_hidden_size": 32, "add_bias_linear": False, "activation_func": torch.nn.Identity()}
    logged = messages()
    found = Outcome(_checkpoint_each_mlp, ["core_attn", "mlp_fc1"], **settings)
    assert found.fingerprint == Outcome(_checkpoint_each_mlp, [], **settings).fingerprint
    assert found.stats.num_groups == 2 * NUM_LAYERS  # of core_attn, in two microbatches
    return logged


def _share_all_layers(chunk: Any) -> None:
    layers = chunk.decoder.layers
    for index in range(1, len(layers)):
        layers[index] = layers[0]


def test_of_a_layer_that_is_called_several_times_the_last_call_stays() -> None:
    run_ranks(_check_shared_layers)


def _check_shared_layers() -> None:
    found = Outcome(_share_all_layers, ["core_attn", "mlp_fc1"])
    assert found.fingerprint == Outcome(_share_all_layers, []).fingerprint
    num_microbatches, num_names = 2, 2
    assert found.stats.num_groups == num_microbatches * num_names * NUM_LAYERS
    assert found.stats.num_kept_groups == num_microbatches * num_names


def _replace_norms(chunk: Any) -> None:
    for layer in chunk.decoder.layers:
        layer.pre_mlp_layernorm = torch.nn.Identity()


def test_a_module_that_returns_its_input_changes_no_bit() -> None:
    """A mark behind it would add up the gradients of its readers before those of others come to it."""
    run_ranks(_check_identity)


def _check_identity() -> None:
    settings: Any = {"moe_shared_expert_intermediate_size": 64}
    found = Outcome(_replace_norms, ["mlp_norm"], "moe", **settings)
    assert found.fingerprint == Outcome(_replace_norms, [], "moe", **settings).fingerprint


class _Net(torch.nn.Module):
    """Not megatron-core's, and without a configuration."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 2)
        self.model = model
        self.config, self.model_type = model.config, model.model_type

    def set_input_tensor(self, tensor: Any) -> None:
        self.model.set_input_tensor(tensor)  # type: ignore[operator]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def test_a_wrapper_is_taken_off_only_as_far_as_there_is_a_configuration() -> None:
    run_ranks(_check_wrapper)


def _check_wrapper() -> None:
    (chunk,) = make_chunks(make_config())
    with apply(OffloadConfig()) as handle:
        assert run([_Net(chunk)], 2) and handle.stats is None


# -- the life of an attachment -----------------------------------------------------------------------------------------


def test_another_choice_of_modules_counts_from_the_next_step_on() -> None:
    run_ranks(_check_other_choice)


def _check_other_choice() -> None:
    found = []
    with apply(OffloadConfig(min_tensor_bytes=1, directory="none")) as handle:
        chunks = make_chunks(make_config(offload_activation=True, offload_modules=["core_attn"]))
        for names in (["core_attn"], ["core_attn", "mlp_fc1"], ["mlp_fc1"]):
            chunks[0].config.offload_modules = names
            run(chunks, 2)
            found.append(_stats(handle).num_groups)
        hooks = _num_hooks(chunks)
        chunks[0].config.offload_modules = ["mlp_fc1"]
        run(chunks, 2)
        assert _num_hooks(chunks) == hooks
    assert found == [2 * NUM_LAYERS, 4 * NUM_LAYERS, 2 * NUM_LAYERS]


def test_a_removed_attachment_goes_before_its_model() -> None:
    run_ranks(_check_removed)


def _check_removed() -> None:
    chunks = make_chunks(make_config())
    attachments = []
    for _ in range(2):
        with apply(OffloadConfig(min_tensor_bytes=1, directory="none"), modules=["core_attn"]) as handle:
            run(chunks, 2)
            attachments.append(weakref.ref(next(iter(handle._runtime._attachments.values())).attachment))
        del handle
    gc.collect()
    assert [attachment() for attachment in attachments] == [None, None]


def test_a_step_in_a_forward_of_another_ends_that_of_its_own_model() -> None:
    run_ranks(_check_nested_steps)


def _check_nested_steps() -> None:
    inner = make_chunks(make_config())
    running: list[Any] = []

    def step(batches: Iterator[torch.Tensor], model: Any, *more: Any) -> Any:
        own = handle._runtime.running_engine
        run(inner, 1)
        running.append(own is not None and handle._runtime.running_engine is own)
        return forward_step(batches, model, *more)

    with apply(OffloadConfig(min_tensor_bytes=1, directory="none"), modules=["core_attn"]) as handle:
        run(make_chunks(make_config()), 2, forward_step=step)
        assert handle._runtime.running_engine is None
    assert running == [True, True]


def test_offload_on_some_ranks_of_a_pipeline() -> None:
    everywhere, *others = (run_ranks(_run_on, on, pipeline=Pipeline(2)) for on in ((), (0,), (1,), (0, 1)))
    for on, found in zip(((0,), (1,), (0, 1)), others, strict=True):
        assert [prints for prints, _ in found] == [prints for prints, _ in everywhere]
        assert [moved > 0 for _, moved in found] == [rank in on for rank in (0, 1)]


def test_where_the_others_begin_anew_a_rank_without_offload_does_so_with_them() -> None:
    """Both checks are made together with every rank: one that left them out would be waited for."""
    assert run_ranks(_fail_twice, pipeline=Pipeline(2), timeout_s=60) == [["no room", "no room"]] * 2


def _fail_twice() -> list[str]:
    is_on = torch.distributed.get_rank() == 0
    settings: Any = {"offload_activation": True, "offload_modules": ["core_attn"]} if is_on else {}
    found = []
    with (
        apply(OffloadConfig(min_tensor_bytes=1, directory="none")),
        mock.patch.object(HostPool, "lend", return_value=None),
    ):
        chunks = make_chunks(make_config(**settings))
        for _ in range(2):
            with pytest.raises(ValueError, match="pipeline rank 0: the host tier has no room for any of"):
                run(chunks, 4)
            found.append("no room")
    return found


def test_a_name_that_matches_nothing_is_an_error_on_the_other_ranks_too() -> None:
    found = run_ranks(_ask_for_experts_on_one_rank, pipeline=Pipeline(2), timeout_s=60)
    assert found[0] == found[1] and "matches nothing in this model: 'router_fc1'" in found[0]


def _ask_for_experts_on_one_rank() -> str:
    is_on = torch.distributed.get_rank() == 0
    settings: Any = {"offload_activation": True, "offload_modules": ["router_fc1"]} if is_on else {}
    with apply(OffloadConfig(directory="none")), pytest.raises(ValueError) as raised:
        run(make_chunks(make_config(**settings)), 4)
    return str(raised.value)


def _run_on(ranks: tuple[int, ...]) -> tuple[dict[str, str], int]:
    is_on = torch.distributed.get_rank() in ranks
    settings: Any = {"offload_activation": True, "offload_modules": ["core_attn"]} if is_on else {}
    with apply(OffloadConfig(min_tensor_bytes=1, directory="none")) as handle:
        chunks = make_chunks(make_config(**settings))
        for _ in range(2):
            losses = run(chunks, 4)
        stats = handle.stats
        return fingerprint(chunks, losses), stats.copied_out_bytes if stats is not None else 0


def _stats(handle: Handle) -> Any:
    assert handle.stats is not None
    return handle.stats


def _num_hooks(chunks: list[torch.nn.Module]) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for chunk in chunks for m in chunk.modules())
