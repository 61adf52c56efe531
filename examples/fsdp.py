# SPDX-License-Identifier: Apache-2.0
"""Trains a small Llama on English text under FSDP2, activations offloaded: torchrun --nproc-per-node 2 fsdp.py [STEPS]

Without torchrun: one process. On GPUs where a node has as many as processes, else on the CPU, which it says. With
--no-offload it trains the same to the last bit; with --checkpoint the inputs of layers are all that is kept, and they
are offloaded.
"""

import argparse
import logging
import os
from pydoc_data import topics  # documentation that every CPython carries

import torch
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tqdm import trange
from transformers import LlamaConfig, LlamaForCausalLM

from offload_engine import OffloadConfig, enable_activation_offloading

BATCH, LENGTH, HIDDEN = 8, 128, 128
TEXT = torch.tensor(list("".join(topics.topics.values()).encode()))  # a token is a byte


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", type=int, nargs="?", default=20)
    parser.add_argument("--no-offload", action="store_true")
    parser.add_argument("--checkpoint", action="store_true")
    args = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    has_gpu = torch.cuda.device_count() >= local_size
    device = torch.device("cuda", local_rank) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")
    logging.info("training on %s: %d GPUs for %d processes", device.type, torch.cuda.device_count(), local_size)
    store = None if "RANK" in os.environ else distributed.HashStore()  # torchrun has one
    distributed.init_process_group("nccl" if has_gpu else "gloo", store=store, rank=rank, world_size=world_size)
    torch.manual_seed(0)  # the same weights everywhere
    shape = dict(vocab_size=256, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=6)
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, use_cache=False, **shape)).to(device)
    mesh = distributed.init_device_mesh(device.type, (world_size,))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    handle = None
    if not args.no_offload:  # the tensors of this model are below the default of 1 MiB
        handle = enable_activation_offloading(
            model, enable_ckpt=args.checkpoint, config=OffloadConfig(min_tensor_bytes=64 << 10)
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)  # other text everywhere
    for _ in (steps := trange(args.steps, disable=rank > 0)):
        tokens = TEXT[torch.randint(len(TEXT) - LENGTH, (BATCH, 1)) + torch.arange(LENGTH)].to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.write(f"rank {rank}: loss {loss.item():.6f}")
    if handle is not None:
        logging.info("%s", handle)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
