# SPDX-License-Identifier: Apache-2.0
"""What the CPUs of a process change on the way to its GPU: copies, launches and pinning.

    torchrun --nproc-per-node 8 benchmarks/run.py affinity

Each rank measures as it was started, then on all CPUs that are not near its GPU, then on those that are, which is what
`OffloadConfig(cpu_affinity=True)` does. All ranks measure at once. The worst rank of each is shown.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.flags import add_flags, new_parser, output_file
from benchmarks.gpu.machine import measure_link, measure_pinning
from benchmarks.gpu.model import Ranks
from benchmarks.records import Records, provenance
from benchmarks.tables import Column, show, table
from offload_engine._devices.affinity import bind_to_gpu

_COPY_BYTES = 64 << 20
_NUM_LAUNCHES = 5000
_WORST: dict[str, Any] = {  # of the ranks: the lowest rate, the longest time
    **dict.fromkeys(("out_gbps", "in_gbps", "both_out_gbps", "both_in_gbps", "host_alloc_gbps", "slab_gbps"), min),
    "launch_us": max,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser("affinity", __doc__)
    add_flags(
        parser,
        ("--markdown", bool, False, "print the table for a document"),
        ("--json", output_file, None, "append the table to this file, a line for each set of CPUs"),
    )
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    ranks = _start()
    rows: list[dict[str, Any]] = []
    for place in _places(torch.device("cuda", torch.cuda.current_device()), ranks.rank):
        figures = ranks.gather(_measure(ranks))
        rows.append({"CPUs": place, **{n: worst(found[n] for found in figures) for n, worst in _WORST.items()}})
    if ranks.rank == 0:
        records = Records(args.json)
        records.write([{"kind": "run", **provenance(["torch"]), "device": torch.cuda.get_device_name()}])
        records.write({"kind": "affinity", **row} for row in rows)
        title = f"{torch.cuda.get_device_name()}, {ranks.world_size} ranks, the worst of each"
        columns: dict[str, Column] = {"CPUs": "CPUs", **{name: (name, ".3g") for name in _WORST}}
        show(table(title, columns, rows, args.markdown))
    dist.destroy_process_group()
    return 0


def _start() -> Ranks:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


def _places(device: torch.device, rank: int) -> Iterator[str]:
    """Yield the name of each set of CPUs that this process runs on then."""
    allowed = frozenset(os.sched_getaffinity(0))
    yield "as started"
    binding = bind_to_gpu(device)
    print(f"rank {rank}: {binding.text}", flush=True)
    for place, cpus in (("far", allowed - binding.cpus), ("near", binding.cpus)):
        if binding.cpus and cpus:
            for thread in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(thread), cpus)
            yield place


def _measure(ranks: Ranks) -> dict[str, Any]:
    link = measure_link(_COPY_BYTES, ranks)
    ranks.barrier()
    tensor = torch.zeros(1, device="cuda")
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(_NUM_LAUNCHES):
            tensor.add_(1)
        seconds.append(time.perf_counter() - begin)
    launch_us = min(seconds) / _NUM_LAUNCHES * 1e6
    return {**link, **measure_pinning(), "launch_us": launch_us}
