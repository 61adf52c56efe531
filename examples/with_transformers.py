# SPDX-License-Identifier: Apache-2.0
"""Trains a small Qwen2 on English text with transformers' Trainer, activations offloaded."""

import argparse
import tempfile
from pydoc_data import topics  # documentation that every CPython carries

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

from offload_engine import OffloadConfig
from offload_engine.frontends.integrations.transformers import OffloadCallback

LENGTH, HIDDEN = 128, 128


class Bytes(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Python's help topics in pieces of LENGTH bytes; a token is a byte."""

    def __init__(self) -> None:
        self.text = torch.tensor(list("".join(topics.topics.values()).encode()))

    def __len__(self) -> int:
        return len(self.text) // LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.text[index * LENGTH : (index + 1) * LENGTH]
        return {"input_ids": piece, "labels": piece}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--no-offload", action="store_true", help="to compare: the losses are equal to the last bit")
    parser.add_argument("--checkpoint", action="store_true", help="recompute the layers, and offload their inputs")
    args = parser.parse_args()
    shape = dict(hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=256, use_cache=False, num_hidden_layers=6, **shape))
    small = OffloadConfig(min_tensor_bytes=64 << 10)  # the tensors of this model are below the default of 1 MiB
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=tempfile.mkdtemp(),  # nothing is saved, and still the Trainer makes a folder
            max_steps=args.steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Bytes(),
        callbacks=[] if args.no_offload else [OffloadCallback(small, enable_ckpt=args.checkpoint)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
