# SPDX-License-Identifier: Apache-2.0
"""`enable_activation_offloading` in one process, also with caches. Under FSDP and DDP: tests/dist/test_fsdp.py."""

from __future__ import annotations

import copy
import io
import logging
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import offload_engine.frontends.layers
from offload_engine import (
    CheckpointOffload,
    FixedBounds,
    GroupWindow,
    LayerOffload,
    OffloadConfig,
    OffloadEngine,
    OffloadError,
    ResidencyMeter,
    enable_activation_offloading,
    manage_activations,
)
from offload_engine.frontends._layers.caches import LayerCaches
from offload_engine.frontends.integrations._training import config_of
from tests.adversarial import AdversarialDevice
from tests.checkpointed import all_equal
from tests.decoders import HIDDEN, LENGTH, SMALL, Trace, make_decoder, train

WIDTH, ROWS = 16, 8
BYTES = 4 * WIDTH * ROWS  # of one activation
ALL = OffloadConfig(min_tensor_bytes=BYTES, directory="none")


class Layer(nn.Module):
    """Saves four activations of `BYTES`: its input, three times, and what linear, sin and dropout give."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: torch.Tensor, memory: Any = None, past_key_values: Any = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = torch.dropout(x * self.linear(x).sin(), 0.2, self.training)
        if memory is not None:
            memory.append(y.detach())
        y = y if past_key_values is None else y + past_key_values
        return y * mask if mask is not None else y


class Variadic(Layer):
    """Its forward names no arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(*args, **kwargs)


class Net(nn.Module):
    """Layers between an embedding and a head, called as `run` says."""

    def __init__(
        self, num_layers: int = 4, run: Callable[..., torch.Tensor] = operator.call, kind: type[Layer] = Layer
    ) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.stem, self.head, self.run = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), run
        self.layers = nn.ModuleList(kind() for _ in range(num_layers))

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = self.run(layer, x, *args, **kwargs)
        return self.head(x).square().mean()


def data(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, seed: int = 0, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Return the loss and every gradient; `args` and `kwargs` go to each layer."""
    torch.manual_seed(seed)
    loss = model(data(seed), *args, **kwargs)
    loss.backward()
    result = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return result


class SquaredMean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


@pytest.fixture
def enable(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LayerOffload]]:
    """Call `enable_activation_offloading` on devices that delay every copy and check every order."""
    handles: list[LayerOffload] = []
    monkeypatch.setattr(offload_engine.frontends.layers, "device_for", lambda parts, config: AdversarialDevice())

    def enable(model: nn.Module, *args: Any, **kwargs: Any) -> LayerOffload:
        handles.append(
            enable_activation_offloading(model, "none", *args, **{"config": ALL, "meter": ResidencyMeter(), **kwargs})
        )
        return handles[-1]

    yield enable
    for handle in handles:
        assert not handle.engine.device.hazards  # type: ignore[attr-defined]
        assert handle.engine.pool.num_leases == 0
        assert handle.engine.meter is not None and handle.engine.meter.current_bytes == 0
        handle.remove()
        assert handle.engine.pool.slab_bytes_total == 0  # the engine is closed
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


Enable = Callable[..., LayerOffload]


@cache
def plain_training(kind: str) -> Trace:
    return train(make_decoder(kind))


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("own", [None, "plain", "reentrant"])
@pytest.mark.parametrize("enable_ckpt", [False, True])
def test_hugging_face_models_train_the_same_to_the_last_bit(
    kind: str, own: str | None, enable_ckpt: bool, enable: Enable
) -> None:
    pytest.importorskip("transformers")
    model: Any = make_decoder(kind)
    if own is not None:
        model.gradient_checkpointing_enable({"use_reentrant": own == "reentrant"})
    handle = enable(model, enable_ckpt, config=SMALL)
    assert model.is_gradient_checkpointing == (own is not None and not enable_ckpt)
    assert train(model) == plain_training(kind)
    stats = handle.stats
    assert (stats.num_offloaded_groups, stats.num_kept_groups, stats.prefetch_misses) == (3, 1, 0)
    assert stats.copied_in_bytes == stats.copied_out_bytes
    input_bytes = 4 * 2 * LENGTH * HIDDEN
    if own is None and not enable_ckpt:
        assert stats.copied_out_bytes > 3 * 10 * input_bytes
    else:
        assert stats.copied_out_bytes == 3 * input_bytes
    handle.remove()
    assert model.is_gradient_checkpointing == (own is not None)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("is_wrapped", [False, True], ids=["by hand", "CheckpointWrapper"])
@pytest.mark.parametrize("enable_ckpt", [False, True])
def test_checkpoints_around_each_layer_keep_working(
    is_wrapped: bool, use_reentrant: bool, enable_ckpt: bool, enable: Enable, caplog: pytest.LogCaptureFixture
) -> None:
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

    model: Any = Net() if is_wrapped else Net(run=lambda layer, x: checkpoint(layer, x, use_reentrant=use_reentrant))
    plain = step(model)
    calls: list[nn.Module] = []
    model.layers[1].linear.register_forward_hook(lambda module, args, output: calls.append(module))
    if is_wrapped:
        impl = wrappers.CheckpointImpl["REENTRANT" if use_reentrant else "NO_REENTRANT"]
        model.layers = nn.ModuleList(wrappers.checkpoint_wrapper(layer, impl) for layer in model.layers)
    handle = enable(model, enable_ckpt)
    assert all_equal(step(model), plain)
    assert len(calls) == 2  # in forward and in recomputation, not twice there
    assert handle.stats.copied_out_bytes == 3 * BYTES  # inputs of layers, nothing else
    assert ("stay checkpointed by that" in caplog.text) == (is_wrapped and enable_ckpt)


def test_large_layer_leaves_in_groups_and_those_that_fit_stay(enable: Enable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_engine.frontends.layers, "GROUP_BYTES", BYTES)
    model = Net(8)
    plain = step(model)
    handle = enable(model)
    assert all_equal(step(model), plain)
    stats = handle.stats
    layer_bytes = stats.kept_bytes
    assert stats.num_offloaded_groups == 7 * 4 and stats.peak_resident_bytes <= 2 * layer_bytes
    # Of the two layers that may stay one is the last; of the other, all but room for a piece need not come back.
    assert stats.copied_in_bytes == 6 * layer_bytes + BYTES and stats.prefetch_misses == 0


class Recurrent(nn.LSTMCell):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)[0]


def test_a_layer_that_writes_the_parts_of_a_storage_one_by_one(enable: Enable, monkeypatch: pytest.MonkeyPatch) -> None:
    """An LSTM does, between their saves: no copy begins in between."""
    monkeypatch.setattr(offload_engine.frontends.layers, "GROUP_BYTES", BYTES // 8)
    torch.manual_seed(3)
    model = nn.Sequential(*(Recurrent(WIDTH, WIDTH) for _ in range(3)), SquaredMean())
    plain = step(model)
    # Each copy is over before what comes next.
    config = ALL.replace(min_tensor_bytes=1, policy=FixedBounds(max_inflight_bytes=0))
    handle = enable(model, layers=list(model)[:3], config=config)
    assert all_equal(step(model), plain)
    assert handle.stats.copied_out_bytes + handle.stats.kept_bytes == handle.stats.managed_bytes


@pytest.mark.parametrize("enable_ckpt", [False, True])
@pytest.mark.parametrize(("num_layers", "num_calls"), [(1, 1), (2, 2), (8, 8), (1, 6), (2, 6)])
def test_each_call_of_a_layer_is_a_group(num_layers: int, num_calls: int, enable_ckpt: bool, enable: Enable) -> None:
    """What is kept is that of the last call alone; at most two calls are on the device."""
    model = Net(num_layers)
    model.layers = nn.ModuleList([*model.layers] * (num_calls // num_layers))
    plain = step(model)
    handle = enable(model, enable_ckpt)
    assert handle.layers == tuple(f"layers.{i}" for i in range(num_layers))
    assert all_equal(step(model), plain)
    stats = handle.stats
    assert (stats.num_offloaded_groups, stats.num_kept_groups, stats.prefetch_misses) == (num_calls - 1, 1, 0)
    assert stats.kept_bytes == (BYTES if enable_ckpt else 4 * BYTES)
    assert stats.managed_bytes == num_calls * stats.kept_bytes
    assert stats.peak_resident_bytes == min(2, num_calls) * stats.kept_bytes


def test_outside_the_layers_only_tensors_saved_by_a_layer_move(enable: Enable) -> None:
    """Nor does what is passed to all of them, unless it is an activation itself."""
    handle = enable(model := Net(5, run=lambda layer, x, **kwargs: layer(x, **kwargs).exp() * x))
    plain, places = step(Net(5, run=model.run)), dict[int, set[str]]()

    def note(*_: Any) -> None:
        for saved in handle.engine._store.live:
            places.setdefault(saved.group.index, set()).add(saved.residency.value)

    with model.head.register_forward_hook(note):
        assert all_equal(step(model), plain)
    assert places[-1] == {"resident"}, "what no layer saved"
    assert all(places[i] == {"on host"} for i in range(4))  # x among it, though the product holds it too
    without = handle.stats.copied_out_bytes
    step(model, mask=torch.ones(ROWS, WIDTH))
    assert handle.stats.copied_out_bytes == without > 0
    step(model, mask=torch.ones(ROWS, WIDTH, requires_grad=True))  # an activation: y, which it multiplies, is saved too
    assert handle.stats.copied_out_bytes > without


@pytest.mark.parametrize("enable_ckpt", [False, True])
@pytest.mark.parametrize("is_wrong", [False, True], ids=["right", "raises"])
@pytest.mark.parametrize("where", ["layers.2", "head"])
def test_a_model_that_looks_at_its_own_output_first(
    where: str, is_wrong: bool, enable_ckpt: bool, enable: Enable
) -> None:
    """As in self-conditioning: a forward without gradients inside one with them, inside a layer or behind them all."""

    def looking(model: Net) -> Net:
        def look(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
            if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
                return None
            with torch.no_grad(), suppress(RuntimeError):
                return (args[0] + model(args[0][:, 1:] if is_wrong else args[0]),)
            return None

        model.get_submodule(where).register_forward_pre_hook(look)
        return model

    handle, plain = enable(model := looking(Net()), enable_ckpt), looking(Net())
    for seed in range(2):
        assert all_equal(step(model, seed), step(plain, seed))
        assert handle.stats.num_offloaded_groups == 3 and handle.stats.num_groups == 4


class InPlace(nn.Module):
    """Runs a module, puts its output into the list that it is given, and returns none."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, state: list[torch.Tensor]) -> None:
        state[0] = self.module(state[0])


def in_place(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    state = [x]
    module(state)
    return state[0]


@pytest.mark.parametrize("is_handling", [False, True])
@pytest.mark.parametrize("are_layers", [True, False], ids=["layers", "body"])
def test_forward_that_returns_none_has_not_raised(are_layers: bool, is_handling: bool, enable: Enable) -> None:
    """Two forwards, of which the second finds the first over, and one backward; also while an error is handled."""
    net = Net(run=in_place if are_layers else operator.call).eval()
    if are_layers:
        net.layers = nn.ModuleList(map(InPlace, net.layers))
    model = net if are_layers else InPlace(net)
    run: Callable[..., torch.Tensor] = net if are_layers else partial(in_place, model)

    def forward(seed: int) -> torch.Tensor:
        try:
            if is_handling:
                raise ValueError("is handled while the model runs")
        except ValueError:
            return run(data(seed))
        return run(data(seed))

    plain = torch.autograd.grad(forward(0) + forward(1), list(net.parameters()))
    handle = enable(model)
    assert all_equal(torch.autograd.grad(forward(0) + forward(1), list(net.parameters())), plain)
    assert (handle.stats.num_offloaded_groups, handle.stats.num_kept_groups) == (7, 1)


@pytest.mark.parametrize("has_gradients", [False, True])
def test_another_thread_runs_the_model_meanwhile(has_gradients: bool, enable: Enable) -> None:
    results: list[list[torch.Tensor]] = []

    def run_beside(*_: Any) -> None:
        with torch.set_grad_enabled(has_gradients):
            loss = model(data(1))
        results.append(list(torch.autograd.grad(loss, list(model.parameters()))) if has_gradients else [loss])

    def start(*_: Any) -> None:
        thread = threading.Thread(target=run_beside)
        hook.remove()
        thread.start()
        thread.join()

    model = Net().eval()
    run_beside()
    plain = step(model)
    handle = enable(model)
    hook = model.layers[2].register_forward_pre_hook(start)
    assert all_equal(step(model), plain)
    assert (handle.stats.num_offloaded_groups, handle.stats.num_kept_groups) == (3, 1)
    assert all_equal(*results)


@pytest.mark.parametrize("is_compiled_first", [False, True])
@pytest.mark.parametrize("enable_ckpt", [False, True])
def test_compiled_layers(enable_ckpt: bool, is_compiled_first: bool, enable: Enable) -> None:
    """`Module.compile` compiles hooks of the module as well, except these."""
    torch._dynamo.reset()
    counters.clear()
    model, plain = Net().eval(), Net().eval()
    handle = None if is_compiled_first else enable(model, enable_ckpt)
    for layer in (*model.layers, *plain.layers):
        layer.compile(backend="aot_eager")
    handle = handle or enable(model, enable_ckpt)
    for seed in range(2):
        assert all_equal(step(model, seed), step(plain, seed))
        assert handle.stats.num_offloaded_groups == 3 and handle.stats.prefetch_misses == 0
    assert counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


@pytest.mark.parametrize("how", ["Module.compile", "torch.compile"])
def test_a_model_compiled_as_a_whole_is_refused(how: str) -> None:
    model: Any = Net().eval()
    plain = step(model)
    handle = enable_activation_offloading(model, "none", config=ALL)
    if how == "Module.compile":
        model.compile(backend="aot_eager")
    compiled: Any = model if how == "Module.compile" else torch.compile(model, backend="aot_eager")
    with pytest.raises(OffloadError, match="the Net that runs the offloaded layers is compiled as a whole"):
        compiled(data())
    with torch.no_grad():
        assert torch.equal(compiled(data()), plain[0])
    handle.remove()
    assert torch.allclose(step(compiled)[0], plain[0])


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (lambda model: model(data()), "nothing was offloaded"),  # all is small
        (lambda model: model.layers[0](data()).sum(), "layers.0 is called outside the forward of Net"),
    ],
)
def test_offload_that_does_nothing_says_so_once(
    run: Callable[[Net], torch.Tensor], told: str, enable: Enable, caplog: pytest.LogCaptureFixture
) -> None:
    enable(model := Net(), config=ALL.replace(min_tensor_bytes=1 << 20))
    with torch.no_grad():
        model(data())
    for _ in range(2):
        run(model).backward()
    (record,) = caplog.records
    assert told in record.getMessage()


def test_remove_gives_everything_back() -> None:
    model: Any = Net()
    model.layers[1].forward = own = lambda x: Layer.forward(model.layers[1], x)
    forwards = [layer.forward for layer in model.layers]
    plain = step(model)
    handle = enable_activation_offloading(model, "none", True, config=ALL)
    assert model.layers[0].forward != forwards[0]
    handle.remove()
    handle.remove()
    assert model.layers[1].forward is own and [layer.forward for layer in model.layers] == forwards
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._forward_hooks_always_called for m in model.modules())
    assert all_equal(step(model), plain) and not handle.engine.is_in_iteration
    enable_activation_offloading(model, "none", config=ALL).remove()


@pytest.mark.parametrize("enable_ckpt", [False, True])
def test_a_copy_of_the_model_is_a_plain_one(enable_ckpt: bool, enable: Enable) -> None:
    handle = enable(model := Net(), enable_ckpt)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(2)  # were its layers those of the model, this would have no effect
        expected = Net()
        expected.load_state_dict(other.state_dict())
        assert all_equal(step(other), step(expected))
        assert handle.stats.num_groups == 0
        enable(other, enable_ckpt)


NOT_A_MODULE: Any = ALL
A_POLICY: Any = GroupWindow(3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda net: enable_activation_offloading(net, "FSDP"), "unknown strategy 'FSDP'; expected one of 'fsdp', "),
        (lambda net: enable_activation_offloading(net, "fsdp2"), "sharded with fully_shard, but this Net is not dis"),
        (lambda net: enable_activation_offloading(net, layers=[]), "names no layer"),
        (lambda net: manage_activations(config=ALL, engine=OffloadEngine(ALL)), "a config or an engine"),
        (lambda net: manage_activations(group_bytes=0, config=ALL), "group_bytes must be positive, got 0"),
        (lambda net: enable_activation_offloading(net, "fsdp"), "not distributed: pass strategy='none'"),
        (
            lambda net: enable_activation_offloading(net, layers=[net.layers[0], nn.Linear(2, 2)]),
            r"layers\[1\] is a Linear that is not a module inside this Net",
        ),
        (lambda net: enable_activation_offloading(net, layers=[net.head] * 2), r"\[1\] is .* given twice"),
        (
            lambda net: enable_activation_offloading(net, layers=[net.layers]),
            r"layers\[0\] is layers, a ModuleList, which is never called: .* layers=list\(model\.layers\)",
        ),
        (
            lambda net: enable_activation_offloading(nn.Linear(2, 2), "none"),
            r"neither layers wrapped by FSDP nor a ModuleList .* layers=\[...\]",
        ),
        (lambda net: enable_activation_offloading(net, NOT_A_MODULE), "got an OffloadConfig as strategy: pass it as c"),
        (lambda net: manage_activations(NOT_A_MODULE), r"got OffloadConfig\. .* manage_activations\(model, config\)"),
        (lambda net: config_of(None, {"policy": A_POLICY}), r"goes into OffloadConfig\(policy=\.\.\.\)"),
        (lambda net: config_of(A_POLICY, {}), r"must be an OffloadConfig, got GroupWindow\("),
    ],
)
def test_what_is_wrong_is_named(call: Callable[[Any], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call(Net())


def test_use_after_the_end() -> None:
    activations, offload, model = manage_activations(config=ALL), CheckpointOffload(ALL), Net()
    handle = enable_activation_offloading(model, config=ALL)
    for each in (activations.close, handle.remove, offload.close):
        each()
    with pytest.raises(OffloadError, match=r"ended by close\(\) or remove\(\): call manage_activations\(\) again"):
        activations.__enter__()
    with pytest.raises(OffloadError, match=r"call enable_activation_offloading\(\) again"):
        handle.forward()
    with offload, pytest.raises(OffloadError, match=r"call CheckpointOffload\(\) again"):
        offload.checkpoint(model, data().requires_grad_())


@pytest.mark.parametrize(
    "choose", [lambda net: list(net.layers), lambda net: [net.layers[0].linear], lambda net: [net.head]]
)
def test_a_second_call_is_refused_until_the_first_is_removed(choose: Callable[[Any], list[nn.Module]]) -> None:
    model: Any = nn.ModuleDict({"first": Net(), "second": Net()})
    net = model["second"]
    handle = enable_activation_offloading(net, config=ALL)
    with pytest.raises(OffloadError, match=r"this Net is already offloaded: call remove\(\) .* layers=\[\.\.\.\]"):
        enable_activation_offloading(net, layers=choose(net), config=ALL)
    with pytest.raises(OffloadError, match=r"this ModuleDict is already offloaded, in second: call remove"):
        enable_activation_offloading(model, layers=list(model["first"].layers), config=ALL)
    handle.remove()
    enable_activation_offloading(net, layers=choose(net), config=ALL).remove()


# -- layers that are given a cache of keys and values: never filled twice, never dropped with what it holds ----------


class Cache(list[torch.Tensor]):
    """What layers have appended, with the methods by which a cache is known."""

    def get_seq_length(self) -> int:
        return len(self)

    def update(self, x: torch.Tensor) -> None:
        self.append(x)


TOKENS = torch.arange(32).view(2, 16)
FILLED, PREFIX = Cache([torch.ones(ROWS, WIDTH)]), torch.ones(WIDTH)


def make_gpt2() -> Any:
    """Make a GPT-2, which passes its cache by position and makes one unless told not to."""
    transformers = pytest.importorskip("transformers", reason="GPT-2 is a model of transformers")
    torch.manual_seed(7)
    sizes = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 2}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=1))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gpt2_with_a_padding_mask(attention: str, enable: Enable) -> None:
    model, mask = make_gpt2(), torch.ones_like(TOKENS)
    model.set_attn_implementation(attention)
    mask[1, 10:] = 0

    def gradients() -> Sequence[torch.Tensor]:
        loss = model(input_ids=TOKENS, labels=TOKENS, attention_mask=mask).loss
        return torch.autograd.grad(loss, list(model.parameters()))

    plain = gradients()
    enable(model, enable_ckpt=True)
    assert all_equal(gradients(), plain)


@pytest.mark.parametrize("kind", [Layer, Variadic])
def test_an_empty_cache_by_position_is_dropped(
    kind: type[Layer], enable: Enable, caplog: pytest.LogCaptureFixture
) -> None:
    model, cache = Net(kind=kind), Cache()
    plain = step(model, 0, Cache())
    enable(model, enable_ckpt=True)
    with caplog.at_level(logging.INFO):
        assert all_equal(step(model, 0, cache), plain) and all_equal(step(model, memory=cache), plain)
    assert not cache
    assert caplog.text.count("receive an empty cache of keys and values, first layers.0") == 1


def test_a_layer_that_a_budget_recomputes_and_is_given_a_cache_runs_once(enable: Enable) -> None:
    """The cache comes first in a step behind those that were measured."""
    model, cache = Net(), Cache()
    plain = step(model, 0, Cache())
    handle: Any = enable(model, config=ALL.replace(gpu_budget=1 << 20))
    for layer in handle._recompute._switches:
        layer.switch(on=True)
    assert all_equal(step(model, 0, cache), plain) and len(cache) == 4


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((FILLED,), {}, "as memory .Cache."),
        ((), {"memory": FILLED}, "as memory .Cache."),
        ((), {"past_key_values": PREFIX}, "as past_key_values .Tensor."),
        ((None, PREFIX), {}, "as past_key_values .Tensor."),
    ],
)
def test_content_is_refused_by_name(args: Any, kwargs: dict[str, Any], message: str, enable: Enable) -> None:
    model = Net()
    plain = step(model)
    enable(model, enable_ckpt=True)
    with pytest.raises(OffloadError, match=f"layers.0 receives a cache .* {message}.* use enable_ckpt=False"):
        step(model, 0, *args, **kwargs)
    assert all_equal(step(model), plain)  # the refused forward has left nothing


def test_a_cache_of_a_fixed_size_is_refused(enable: Enable) -> None:
    """Masks are made for all of it."""
    transformers = pytest.importorskip("transformers", reason="its caches")
    model: Any = make_decoder("llama", 3)
    enable(model, enable_ckpt=True, config=SMALL)
    cache = transformers.StaticCache(model.config, max_cache_len=32)
    with pytest.raises(OffloadError, match="fixed size"):
        model(input_ids=TOKENS, past_key_values=cache, use_cache=True)


def test_an_empty_cache_of_an_encoder_and_a_decoder() -> None:
    transformers = pytest.importorskip("transformers", reason="its caches")
    caches, parts = LayerCaches(Net()), [transformers.DynamicCache(), transformers.DynamicCache()]
    both = transformers.EncoderDecoderCache(*parts)
    assert caches.is_empty(both)
    parts[1].update(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), 0)
    assert not caches.is_empty(both)
