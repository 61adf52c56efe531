# SPDX-License-Identifier: Apache-2.0
"""Trains transformer layers on English text with Lightning's Trainer, activations offloaded."""

import argparse
from pydoc_data import topics  # documentation that every CPython carries
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn

from offload_engine import OffloadConfig
from offload_engine.frontends.integrations.lightning import OffloadCallback

BATCH, LENGTH, HIDDEN, DEPTH = 8, 128, 128, 6


class TextModel(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, HIDDEN), nn.Linear(HIDDEN, 256)
        layers = [nn.TransformerEncoderLayer(HIDDEN, 4, 4 * HIDDEN, batch_first=True) for _ in range(DEPTH)]
        self.layers = nn.ModuleList(layers)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def training_step(self, text: torch.Tensor, index: int) -> torch.Tensor:
        x = self.embedding(text[:, :-1])
        for layer in self.layers:
            x = layer(x, self.mask, is_causal=True)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten())
        print(f"batch {index}: loss {loss.item():.6f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--no-offload", action="store_true", help="to compare: the losses are equal to the last bit")
    args = parser.parse_args()
    seed_everything(0)
    text = torch.tensor(list("".join(topics.topics.values()).encode()))  # a token is a byte
    pieces: Any = torch.utils.data.DataLoader(text.unfold(0, LENGTH + 1, LENGTH), batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]
    small = OffloadConfig(min_tensor_bytes=64 << 10)  # the tensors of this model are below the default of 1 MiB
    trainer = Trainer(
        max_steps=args.steps,
        accumulate_grad_batches=2,
        callbacks=[] if args.no_offload else [OffloadCallback(small)],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(TextModel(), pieces)
    for name in () if args.no_offload else ("offload_moved_gib", "offload_peak_resident_gib"):
        print(f"{name}: {1024 * trainer.callback_metrics[name]:.1f} MiB in the last batch")


if __name__ == "__main__":
    main()
