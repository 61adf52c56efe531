# SPDX-License-Identifier: Apache-2.0
"""`offload_wrapper`: parity to the last bit, where the inputs of checkpointed layers are, and what stays as it was."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from offload_engine import GroupWindow, OffloadConfig, OffloadEngine, WrapperHandle, offload_wrapper
from tests.adversarial import AdversarialDevice
from tests.checkpointed import (
    DEPTH,
    FAMILIES,
    INPUT_BYTES,
    WAYS,
    Stack,
    all_equal,
    first_recomputation,  # noqa: F401 (a fixture)
    make_language_model,
    make_stack,
    random_tokens,
    watch_inputs,
)
from tests.decoders import HIDDEN, LENGTH, train

PLAIN = OffloadConfig(min_tensor_bytes=1024, directory="none")  # position ids, shared by all layers, are smaller
OTHER = PLAIN.replace(policy=GroupWindow(5))
needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed; pip install transformers"
)


@pytest.fixture
def wrap(device: AdversarialDevice) -> Iterator[Callable[..., Any]]:
    """Wrap a model with an engine on the adversarial device."""
    handles: list[WrapperHandle] = []

    def wrap(model: Any, horizon: int = 2, **settings: Any) -> Any:
        config = OffloadConfig.from_flags(**{"min_tensor_bytes": 1024, "horizon_groups": horizon, **settings})
        model = offload_wrapper(model, engine=OffloadEngine(config, device))
        handles.append(model.activation_offload)
        return model

    yield wrap
    for handle in handles:
        handle.remove()


def step(model: nn.Module) -> list[torch.Tensor]:
    """Run one step of a `Stack`: its loss and its gradients."""
    torch.manual_seed(0)
    x = torch.randn(2, LENGTH, HIDDEN)
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@needs_transformers
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_language_models_train_to_the_last_bit(
    wrap: Callable[..., Any], device: AdversarialDevice, family: str, way: str
) -> None:
    """Attention dropout, accumulated gradients, evaluation in between.

    Every copy comes as late as the waits allow, and bytes read without one are NaN.
    """
    model = wrap(make_language_model(family, way))
    with device.observe_compute():
        found = train(model)
    assert model.activation_offload.stats.copied_out_bytes == DEPTH * INPUT_BYTES
    assert device.num_copies["in"] > 0 and not model.activation_offload.engine.is_in_iteration
    model.activation_offload.remove()
    assert found == train(make_language_model(family, way))


@needs_transformers
@pytest.mark.parametrize("way", WAYS)
def test_the_storages_of_a_language_model_go(wrap: Callable[..., Any], way: str) -> None:
    """The first input, the embeddings, is a local variable of the model until its forward returns."""
    model = wrap(make_language_model("llama", way))
    layers = [getattr(layer, "_checkpoint_wrapped_module", layer) for layer in model.model.layers]
    # Their first parts: in transformers 5.23 a layer's own hooks run in front of its checkpoint.
    with watch_inputs([layer.input_layernorm for layer in layers]) as alive:
        loss = model(random_tokens(0), labels=random_tokens(0)).loss
    assert alive == [[0], *([0, i] for i in range(1, DEPTH)), [DEPTH - 1]]
    loss.backward()


def test_a_copy_of_the_model_is_checkpointed_without_offload(wrap: Callable[..., Any]) -> None:
    model, file = wrap(make_stack()), io.BytesIO()
    expected = step(model)
    torch.save(model, file)
    file.seek(0)
    before = model.activation_offload.stats
    for twin in (torch.load(file, weights_only=False), copy.deepcopy(model)):
        assert twin.activation_offload is None and all_equal(step(twin), expected)
        assert model.activation_offload.stats is before
        again = offload_wrapper(twin, config=PLAIN)
        assert all_equal(step(again), expected) and again.activation_offload.stats.copied_out_bytes
        again.activation_offload.remove()


@needs_transformers
def test_checkpointing_enabled_anew_is_offloaded_again(wrap: Callable[..., Any]) -> None:
    """As transformers' Trainer does when it starts; and while it is disabled there is nothing to offload."""
    own, tokens = make_language_model("llama", "transformers"), random_tokens(0)
    keys, functions = list(own.state_dict()), [layer._gradient_checkpointing_func for layer in own.model.layers]
    model = offload_wrapper(own, config=PLAIN)
    assert model is own and list(model.state_dict()) == keys
    model.activation_offload.remove()
    assert [layer._gradient_checkpointing_func for layer in model.model.layers] == functions
    assert not hasattr(model, "activation_offload") and not model._forward_pre_hooks
    model = wrap(model)
    for is_reentrant in (True, False):
        model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
        model(tokens, labels=tokens).loss.backward()
        assert model.activation_offload.stats.copied_out_bytes == DEPTH * INPUT_BYTES
    model.gradient_checkpointing_disable()
    before = model.activation_offload.stats
    model(tokens, labels=tokens).loss.backward()
    assert model.activation_offload.stats is before
    model.activation_offload.remove()
    assert not model.is_gradient_checkpointing


def test_wrapped_twice_or_without_checkpoints_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"Stack is checkpointed.*apply_activation_checkpointing\(model"):
        offload_wrapper(Stack())
    model = offload_wrapper(make_stack(), config=PLAIN)
    with pytest.raises(ValueError, match="Stack is already wrapped"):
        offload_wrapper(model)
    with pytest.raises(ValueError, match="0 is already wrapped"):
        offload_wrapper(nn.Sequential(model))
    model.activation_offload.remove()
    offload_wrapper(model, config=PLAIN).activation_offload.remove()


def test_a_horizon_that_is_wrong_or_has_no_effect_is_an_error(device: AdversarialDevice) -> None:
    """Also where it is the one that would be taken without any."""
    engine = OffloadEngine(OTHER.replace(directory=None), device)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (True, {}, "activation_loading_horizon must be a positive integer, got True"),
        (2, {"config": OTHER}, r"activation_loading_horizon=2 and policy=GroupWindow\(num_groups=5"),
        (2, {"engine": engine}, "activation_loading_horizon=2 comes too late"),
        (None, {"config": PLAIN, "engine": engine}, "a config or an engine"),
    ]
    for horizon, settings, message in cases:
        with pytest.raises(ValueError, match=message):
            offload_wrapper(make_stack(), horizon, **settings)


@needs_transformers
def test_two_offloads_of_the_same_inputs_are_told(caplog: pytest.LogCaptureFixture, wrap: Callable[..., Any]) -> None:
    def save_elsewhere(function: Callable[..., Any], *args: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)

    own = make_language_model("llama", "transformers")
    own._set_gradient_checkpointing(True, save_elsewhere)
    model = wrap(own)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            model(random_tokens(0), labels=random_tokens(0)).loss.backward()
    assert [r for r in caplog.messages if "offload=True" in r] == caplog.messages and len(caplog.messages) == 1
