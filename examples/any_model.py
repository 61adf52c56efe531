# SPDX-License-Identifier: Apache-2.0
"""Trains a small, unmodified model on English text, activations offloaded."""

import argparse
from contextlib import nullcontext
from pydoc_data import topics  # documentation that every CPython carries

import torch
from torch import nn
from tqdm import trange

from offload_engine import OffloadConfig, manage_activations

BATCH, LENGTH, HIDDEN, DEPTH = 8, 128, 128, 12


class TextModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, HIDDEN), nn.Parameter(torch.zeros(LENGTH, HIDDEN))
        layer = nn.TransformerEncoderLayer(HIDDEN, 4, 4 * HIDDEN, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, DEPTH), nn.Linear(HIDDEN, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position
        return self.head(self.layers(x, self.mask, is_causal=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-offload", action="store_true", help="to compare: the losses are equal to the last bit")
    args = parser.parse_args()
    torch.manual_seed(0)
    text = torch.tensor(list("".join(topics.topics.values()).encode()))
    model = TextModel().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    small = OffloadConfig(min_tensor_bytes=64 << 10)  # the tensors of this model are below the default of 1 MiB
    activations = manage_activations(model, small, group_bytes=4 << 20)  # and its layers below that of 32 MiB
    losses = []
    for _ in trange(args.steps):
        tokens = text[torch.randint(len(text) - LENGTH, (BATCH, 1)) + torch.arange(LENGTH + 1)].to(args.device)
        with nullcontext() if args.no_offload else activations:
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print("losses", *(f"{loss:.6f}" for loss in losses))
    if not args.no_offload:
        stats = activations.stats
        print(f"saved per step: {stats.managed_bytes >> 20} MiB, resident: {stats.peak_resident_bytes >> 20} at most")
        print(f"host memory: {stats.host_bytes >> 20} MiB, copy-ins that came late: {stats.prefetch_misses}")


if __name__ == "__main__":
    main()
