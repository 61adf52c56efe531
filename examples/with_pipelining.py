# SPDX-License-Identifier: Apache-2.0
"""Trains transformer layers on English text, two pipeline stages on each rank, activations offloaded.

torchrun --nproc-per-node 2 examples/with_pipelining.py --schedule DualPipeV
"""

import argparse
import os
from contextlib import nullcontext
from pydoc_data import topics  # documentation that every CPython carries

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from offload_engine import OffloadConfig
from offload_engine.frontends.integrations.pipelining import offload_schedule

BATCH, LENGTH, HIDDEN, MICROBATCHES = 4, 128, 128, 8
SCHEDULES = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


def make_stage(index: int, num_stages: int, device: torch.device) -> PipelineStage:
    torch.manual_seed(index)
    layers: list[nn.Module] = [nn.Embedding(256, HIDDEN)] if index == 0 else []
    layers += [nn.TransformerEncoderLayer(HIDDEN, 4, 4 * HIDDEN, batch_first=True) for _ in range(2)]
    if index == num_stages - 1:
        layers += [nn.Linear(HIDDEN, 256), nn.Flatten(0, 1)]
    return PipelineStage(nn.Sequential(*layers), index, num_stages, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedule", choices=SCHEDULES, default=SCHEDULES[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--no-offload", action="store_true", help="to compare: the losses are equal to the last bit")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: a pipeline has several processes")
    dist.init_process_group()
    device = torch.device(f"cuda:{dist.get_node_local_rank()}" if torch.cuda.is_available() else "cpu")
    torch.set_default_device(device)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    second = 2 * num_ranks - 1 - rank if args.schedule in SCHEDULES[-2:] else rank + num_ranks
    stages = [make_stage(index, 2 * num_ranks, device) for index in (rank, second)]
    schedule = schedules.get_schedule_class(args.schedule)(stages, MICROBATCHES, nn.functional.cross_entropy)
    optimizer = torch.optim.AdamW((p for stage in stages for p in stage.submod.parameters()), lr=1e-3)
    text = torch.tensor(list("".join(topics.topics.values()).encode()))  # a token is a byte
    small = OffloadConfig(min_tensor_bytes=64 << 10)  # the tensors of this model are below the default of 1 MiB
    with nullcontext() if args.no_offload else offload_schedule(schedule, small, group_bytes=1 << 20):
        for step in range(args.steps):
            batch = text.unfold(0, LENGTH + 1, LENGTH)[step * MICROBATCHES * BATCH :][: MICROBATCHES * BATCH]
            inputs = [batch[:, :-1]] if rank == 0 else []
            losses: list[torch.Tensor] = []
            schedule.step(*inputs, target=batch[:, 1:].flatten(), losses=losses, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
            print(*(f"loss {loss.item():.6f}" for loss in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
