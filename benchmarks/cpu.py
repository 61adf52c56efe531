# SPDX-License-Identifier: Apache-2.0
"""Python time that the engine takes for one group of three tensors, with copies that do nothing. Needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.flags import add_flags, new_parser, output_file, positive
from benchmarks.group_cost import microseconds_of_a_group
from benchmarks.records import Records, core_in_words
from offload_engine import IS_COMPILED, OffloadConfig, OffloadEngine
from offload_engine._devices.regions import new_buffer


class InstantDevice:
    """A device whose copies take no time and move nothing: what is left is the engine's own cost."""

    torch_device = torch.device("cpu")
    host_alignment = 64
    memory = graphs = None
    busy_ratio = 1.0

    # Each with its own arguments: to pack any takes longer than a call.
    def new_stream(self, name: str) -> str:
        return name

    def current_stream(self) -> str:
        return "compute"

    def record_event(self, stream: str) -> str:
        return stream

    def wait_event(self, stream: str, event: str) -> None: ...

    def wait_stream(self, stream: str, leader: str) -> None: ...

    def synchronize(self, event: str) -> None: ...

    def copy_out(self, stream: str, copies: Sequence[tuple[torch.Tensor, Any]]) -> str:
        return stream

    def copy_in(self, stream: str, copies: Sequence[tuple[Any, torch.Tensor]]) -> str:
        return stream

    def mark_time(self, stream: str) -> float:
        return 0.0

    def milliseconds_between(self, first: float, last: float) -> float:
        return 0.0

    def is_copy_thread(self) -> bool:
        return False

    def is_complete(self, event: str) -> bool:
        return True

    def allocate(self, nbytes: int, stream: str, spec: Any = None) -> torch.Tensor:
        return new_buffer(nbytes, spec, self.torch_device)

    def free_host_bytes(self) -> int:
        return 1 << 40

    def new_slab(self, nbytes: int) -> Any:
        return SimpleNamespace(nbytes=nbytes, close=lambda: None)

    def close(self) -> None: ...


def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser("cpu", __doc__)
    add_flags(
        parser,
        ("--repeats", positive, 60, "of which the best counts"),
        ("--json", output_file, None, "append the figure to this file"),
    )
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0), device=InstantDevice())  # type: ignore[arg-type]
    value = microseconds_of_a_group(engine, repeats=tqdm(range(args.repeats), leave=False))
    engine.close()
    Records(args.json).write([{"kind": "group_cost", "us": value, "is_compiled": IS_COMPILED}])
    print(f"a group of three tensors, through autograd: {value:.1f} us (core {core_in_words()})")
    return 0
