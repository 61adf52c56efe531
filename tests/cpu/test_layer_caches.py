# SPDX-License-Identifier: Apache-2.0
"""Layers that are given a cache of keys and values: never filled twice, never dropped with what it holds."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from offload_engine import OffloadConfig, OffloadError, enable_activation_offloading
from tests.checkpointed import all_equal
from tests.decoders import SMALL, make_decoder

WIDTH, ROWS, DEPTH, TOKENS = 8, 4, 3, torch.arange(32).view(2, 16)
ALL = OffloadConfig(min_tensor_bytes=1, directory="none")


class Cache:
    """The methods of a cache, and what layers have appended to it."""

    def __init__(self, *content: torch.Tensor) -> None:
        self.kept = list(content)

    def get_seq_length(self) -> int:
        return len(self.kept)

    def update(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.append(x.detach())
        return torch.stack([x, *self.kept]).sum(0)


class Layer(nn.Module):
    """Adds what its cache holds, or a prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, memory: Any = None, past_key_values: Any = None) -> torch.Tensor:
        y = self.linear(x).tanh()
        if memory is not None:
            memory.update(y.detach())
        return y if past_key_values is None else y + past_key_values


class Variadic(Layer):
    """Its forward names no arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(*args, **kwargs)


class Net(nn.Module):
    def __init__(self, kind: type[Layer] = Layer) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(kind() for _ in range(DEPTH))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        x = torch.ones(ROWS, WIDTH)
        for layer in self.layers:
            x = layer(x, *args, **kwargs)
        return x.sum()


def numbers(model: nn.Module, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Run a step; return the loss and the gradients."""
    found = model(*args, **kwargs)
    loss: torch.Tensor = getattr(found, "loss", found)
    loss.backward()
    result = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return result


def make_gpt2() -> Any:
    """Make a GPT-2, which passes its cache by position and makes one unless told not to."""
    transformers = pytest.importorskip("transformers", reason="GPT-2 is a model of transformers")
    torch.manual_seed(7)
    sizes = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 2}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=1))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gpt2_with_a_padding_mask(attention: str) -> None:
    model, mask = make_gpt2(), torch.ones_like(TOKENS)
    model.set_attn_implementation(attention)
    mask[1, 10:] = 0
    batch = {"input_ids": TOKENS, "labels": TOKENS, "attention_mask": mask}
    plain = numbers(model, **batch)
    handle = enable_activation_offloading(model, enable_ckpt=True, config=ALL)
    assert all_equal(numbers(model, **batch), plain)
    handle.remove()


@pytest.mark.parametrize("kind", [Layer, Variadic])
def test_an_empty_cache_by_position_is_dropped(kind: type[Layer], caplog: pytest.LogCaptureFixture) -> None:
    model, cache = Net(kind), Cache()
    plain = numbers(model, Cache())
    handle = enable_activation_offloading(model, enable_ckpt=True, config=ALL)
    with caplog.at_level(logging.INFO):
        assert all_equal(numbers(model, cache), plain) and all_equal(numbers(model, memory=cache), plain)
    handle.remove()
    assert not cache.kept
    assert caplog.text.count("receive an empty cache of keys and values, first layers.0") == 1


def test_a_layer_that_a_budget_recomputes_and_is_given_a_cache_runs_once() -> None:
    """The cache comes first in a step behind those that were measured."""
    model, cache = Net(), Cache()
    plain = numbers(model, Cache())
    handle = enable_activation_offloading(model, config=ALL.replace(gpu_budget=3500))
    for layer in handle._recompute._switches:  # type: ignore[union-attr]
        layer.switch(on=True)
    assert all_equal(numbers(model, cache), plain) and len(cache.kept) == DEPTH
    handle.remove()


FILLED, PREFIX = Cache(torch.ones(ROWS, WIDTH)), torch.ones(WIDTH)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((FILLED,), {}, "as memory .Cache."),
        ((), {"memory": FILLED}, "as memory .Cache."),
        ((), {"past_key_values": PREFIX}, "as past_key_values .Tensor."),
        ((None, PREFIX), {}, "as past_key_values .Tensor."),
    ],
)
def test_content_is_refused_by_name(args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    model = Net()
    plain = numbers(model)
    handle = enable_activation_offloading(model, enable_ckpt=True, config=ALL)
    with pytest.raises(OffloadError, match=f"layers.0 receives a cache .* {message}.* use enable_ckpt=False"):
        model(*args, **kwargs)
    assert all_equal(numbers(model), plain)  # the refused forward has left nothing
    handle.remove()


def test_a_cache_of_a_fixed_size_is_refused() -> None:
    """Masks are made for all of it."""
    transformers = pytest.importorskip("transformers", reason="its caches")
    model: Any = make_decoder("llama", DEPTH)
    handle = enable_activation_offloading(model, enable_ckpt=True, config=SMALL)
    cache = transformers.StaticCache(model.config, max_cache_len=32)
    with pytest.raises(OffloadError, match="fixed size"):
        model(input_ids=TOKENS, past_key_values=cache, use_cache=True)
    handle.remove()


def test_an_empty_cache_of_an_encoder_and_a_decoder() -> None:
    transformers = pytest.importorskip("transformers", reason="its caches")
    from offload_engine.frontends._layers.caches import LayerCaches

    caches, parts = LayerCaches(Net()), [transformers.DynamicCache(), transformers.DynamicCache()]
    both = transformers.EncoderDecoderCache(*parts)
    assert caches.is_empty(both)
    parts[1].update(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), 0)
    assert not caches.is_empty(both)
