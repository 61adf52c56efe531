# SPDX-License-Identifier: Apache-2.0
"""Trains a small Llama on English text with accelerate, activations offloaded.

`accelerate launch examples/with_accelerate.py` trains on several GPUs, under DDP or FSDP.
"""

import argparse
from itertools import islice
from pydoc_data import topics  # documentation that every CPython carries
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from offload_engine import OffloadConfig, enable_activation_offloading

BATCH, LENGTH, HIDDEN = 8, 128, 128


def strategy_of(accelerator: Accelerator) -> str:
    if accelerator.distributed_type == DistributedType.FSDP:
        return "fsdp2" if accelerator.state.fsdp_plugin.fsdp_version == 2 else "fsdp"
    return "none" if accelerator.distributed_type == DistributedType.NO else "ddp"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--no-offload", action="store_true", help="to compare: the losses are equal to the last bit")
    args = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    text = torch.tensor(list("".join(topics.topics.values()).encode()))  # a token is a byte
    pieces: Any = torch.utils.data.DataLoader(text.unfold(0, LENGTH, LENGTH), batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]
    shape = dict(vocab_size=256, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=6)
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, use_cache=False, **shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, pieces = accelerator.prepare(model, optimizer, pieces)
    small = OffloadConfig(min_tensor_bytes=64 << 10)  # the tensors of this model are below the default of 1 MiB
    offload = None if args.no_offload else enable_activation_offloading(model, strategy_of(accelerator), config=small)
    for tokens in tqdm(islice(pieces, 2 * args.steps), total=2 * args.steps, disable=not accelerator.is_main_process):
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"loss {loss.item():.6f}")
    if offload is not None:
        accelerator.print(f"offloaded in the last batch: {offload.stats.copied_out_bytes / 2**20:.1f} MiB")
        offload.remove()


if __name__ == "__main__":
    main()
