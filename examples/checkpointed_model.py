# SPDX-License-Identifier: Apache-2.0
"""Trains a checkpointed Llama of transformers on English text, without and with offload.

The weights are random, and small enough for a CPU. With offload_wrapper() the inputs of the checkpointed layers, which
is all that checkpointing keeps, live on the host between forward and backward.
"""

import argparse
from pydoc_data import topics  # documentation that every CPython carries
from typing import Any

import torch
from tqdm import trange
from transformers import LlamaConfig, LlamaForCausalLM

from offload_engine import (
    GroupWindow,
    OffloadConfig,
    OffloadEngine,
    ResidencyMeter,
    SavedTensorTracker,
    offload_wrapper,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, LENGTH, HIDDEN, DEPTH = 4, 128, 128, 12
TEXT = torch.tensor(list("".join(topics.topics.values()).encode()), device=DEVICE)  # one token per byte


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN, "num_hidden_layers": DEPTH}
    config = LlamaConfig(vocab_size=256, num_attention_heads=4, use_cache=False, **sizes)
    model = LlamaForCausalLM(config).to(DEVICE).train()
    model.gradient_checkpointing_enable()  # PyTorch's apply_activation_checkpointing(model, ...) does as well
    return model


def train(model: LlamaForCausalLM, num_steps: int, meter: ResidencyMeter) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in trange(num_steps, desc="offload" if hasattr(model, "activation_offload") else "no offload"):
        text = TEXT[torch.randint(len(TEXT) - LENGTH, (BATCH, 1), device=DEVICE) + torch.arange(LENGTH, device=DEVICE)]
        with SavedTensorTracker(meter, model.parameters()):  # counts what the engine does not manage
            loss = model(text, labels=text).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", type=int, nargs="?", default=10)
    steps, before, after = parser.parse_args().steps, ResidencyMeter(), ResidencyMeter()
    plain = train(make_model(), steps, before)
    # A real model needs no more than `model = offload_wrapper(model)`. The inputs of this one are below 1 MiB, which is
    # the smallest that leaves by default, and a meter is there for the figures below.
    small = OffloadConfig(min_tensor_bytes=64 << 10, policy=GroupWindow(2))
    model = offload_wrapper(make_model(), engine=OffloadEngine(small, meter=after))
    offloaded = train(model, steps, after)
    stats: Any = model.activation_offload.stats
    print(f"loss {plain[0]:.4f} -> {plain[-1]:.4f}; with offload equal to the last bit: {plain == offloaded}")
    on_device, inputs = stats.peak_resident_bytes >> 10, stats.managed_bytes >> 10
    print(f"inputs of layers: {inputs} KiB, at most {on_device} KiB of them on the device at once")
    print(f"all saved activations, peak: {before.peak_bytes >> 10} KiB, with offload {after.peak_bytes >> 10} KiB")
