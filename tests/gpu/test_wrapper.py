# SPDX-License-Identifier: Apache-2.0
"""`offload_wrapper` and `checkpoint` on a real GPU: parity to the last bit, and memory as the allocator sees it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload_engine import CheckpointOffload, GroupWindow, OffloadConfig, offload_wrapper
from tests.checkpointed import FAMILIES, WAYS, all_equal, make_language_model
from tests.gpu.parity import peak_of_second, run_twice

LENGTH, HIDDEN, DEPTH, VOCABULARY = 4096, 1024, 12, 512
INPUT_BYTES = LENGTH * HIDDEN * 2
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
}


def make(family: str, way: str | None) -> Any:
    with torch.device("cuda"):
        return make_language_model(family, way, attention_dropout=0.0, **SIZES).bfloat16()


def train(model: Any, num_steps: int = 3) -> list[torch.Tensor]:
    """Return losses and all gradients; the GPU is far behind the host all the time."""
    seen: list[torch.Tensor] = []
    for step in range(num_steps):
        tokens = torch.randint(VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(step)).cuda()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        model.zero_grad()
    return seen


def peak_of_step(model: Any) -> int:
    tokens = torch.ones(1, LENGTH, dtype=torch.int64, device="cuda")
    return peak_of_second(lambda: model.model(tokens).last_hidden_state.sum().backward())


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_gradient_to_the_last_bit(family: str, way: str) -> None:
    model = offload_wrapper(make(family, way))
    found = train(model)
    stats = model.activation_offload.stats
    model.activation_offload.remove()
    assert all_equal(found, run_twice(lambda: train(make(family, way)), all_equal))
    assert stats.copied_out_bytes == DEPTH * INPUT_BYTES and stats.peak_resident_bytes <= 2 * INPUT_BYTES


@pytest.mark.parametrize("way", WAYS)
def test_the_inputs_are_off_the_device(way: str) -> None:
    """At the turn-around plain checkpointing holds all inputs; with offload two of them, and the embeddings."""
    plain = peak_of_step(make("llama", way))
    model = offload_wrapper(make("llama", way))
    offloaded = peak_of_step(model)
    model.activation_offload.remove()
    assert plain - offloaded >= (DEPTH - 4) * INPUT_BYTES


@pytest.mark.usefixtures("deterministic")
def test_checkpoint_as_the_function_of_transformers() -> None:
    import offload_engine

    model = make("qwen2", None)
    model._set_gradient_checkpointing(True, offload_engine.checkpoint)
    with CheckpointOffload(OffloadConfig(policy=GroupWindow(2))) as offload:
        found = train(model)
    assert offload.stats.copied_out_bytes == DEPTH * INPUT_BYTES
    offload.close()
    assert all_equal(found, run_twice(lambda: train(make("qwen2", "transformers")), all_equal))
