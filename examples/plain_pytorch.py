# SPDX-License-Identifier: Apache-2.0
"""Trains transformer layers on English text in plain PyTorch, without and with offload."""

import argparse
from contextlib import nullcontext
from pydoc_data import topics  # documentation that every CPython carries

import torch
from torch import nn
from tqdm import trange

from offload_engine import OffloadConfig, OffloadEngine, ResidencyMeter, SavedTensorTracker, group_commit, group_start

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
BATCH, LENGTH, HIDDEN, DEPTH = 8, 128, 128, 12
TEXT = torch.tensor(list("".join(topics.topics.values()).encode()))


class TextModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, HIDDEN)
        layers = [nn.TransformerEncoderLayer(HIDDEN, 4, 4 * HIDDEN, batch_first=True) for _ in range(DEPTH)]
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(HIDDEN, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens: torch.Tensor, engine: OffloadEngine | None) -> torch.Tensor:
        x = self.embedding(tokens)
        chunk = engine.start_chunk() if engine is not None and engine.is_active else None
        for layer in self.layers:  # one group for each call of a layer
            x = group_start(x, chunk, name="layer") if chunk else x
            with chunk.saved_tensors_hooks() if chunk else nullcontext():
                x = layer(x, self.mask, is_causal=True)
            x = group_commit(x, chunk) if chunk else x
        return self.head(x)


def train(num_steps: int, engine: OffloadEngine | None, meter: ResidencyMeter) -> list[float]:
    torch.manual_seed(0)
    model, losses = TextModel(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    weights = [*model.parameters(), *model.buffers()]
    for _ in trange(num_steps, desc="offload" if engine else "no offload"):
        text = TEXT[torch.randint(len(TEXT) - LENGTH, (BATCH, 1)) + torch.arange(LENGTH + 1)]
        iteration = engine.iteration(weights=weights) if engine else nullcontext()
        with iteration, SavedTensorTracker(meter, weights):  # counts what the engine does not manage
            loss = nn.functional.cross_entropy(model(text[:, :-1], engine).flatten(0, 1), text[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", type=int, nargs="?", default=10)
    steps, before, after = parser.parse_args().steps, ResidencyMeter(), ResidencyMeter()
    small = OffloadConfig(min_tensor_bytes=64 << 10)  # the tensors of this model are below the default of 1 MiB
    plain, offloaded = train(steps, None, before), train(steps, OffloadEngine(small, meter=after), after)
    print(f"loss {plain[0]:.4f} -> {plain[-1]:.4f}; with offload equal to the last bit: {plain == offloaded}")
    print(f"resident saved activations, peak: {before.peak_bytes >> 20} MiB, with offload {after.peak_bytes >> 20} MiB")
