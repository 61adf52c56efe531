# SPDX-License-Identifier: Apache-2.0
"""The contenders, and how one model in one process is switched between them.

All of them run on the same chunks, weights and tokens. A contender is attached for one turn and detached after it:

- `recompute`: no offload, and full recomputation of every layer (`recomputation.py`).
- `none`: nothing to do. Every kind of offload is off in the configuration with which the model was built.
- `ours`: `megatron_patches.apply()`, and at the end of the turn `Handle.remove()`, which takes every hook and patch
  off, closes the engine and gives its pinned memory back.
- `budget`: ours, with nothing set but `gpu_budget` (`budget.py`).
- `incumbent`: its switches are read from the configuration when the modules are constructed and kept in attributes, so
  `switch_incumbent()` sets both. The singleton `PipelineOffloadManager` is made anew for each turn, so that each begins
  with the warm-up step in which it records the chunks, and is dropped at the end.

Ours and the incumbent also beside selective recomputation, where their entry says so.

That a contender really moved bytes is counted where the copies are issued (`counting()`), with a pair of events on the
stream that does them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from benchmarks.records import counters_of

from .copies import CopyCounter
from .recomputation import FULL, Recomputation, selective
from .settings import Entry

# Attribute of attention and experts -> name in offload_modules.
_CACHED = {
    "offload_qkv_linear": "qkv_linear",
    "offload_core_attention": "core_attn",
    "offload_attn_proj": "attn_proj",
    "offload_expert_fc1": "expert_fc1",
    "offload_moe_act": "moe_act",
    "offload_fused_group_mlp": "fused_group_mlp",
}


class Contender:
    """One way to run the step: this one without offload, and with what its entry recomputes.

    Between `detach()` and `attach()` the model is as it was built.
    """

    def __init__(self, entry: Entry, chunks: Sequence[Any]) -> None:
        self.entry = entry
        self._chunks = list(chunks)
        recomputed = FULL if entry.kind == "recompute" else selective(entry.recomputed)
        self._recomputation = Recomputation(chunks, recomputed)

    def attach(self) -> None:
        """Put it on the model."""
        self._recomputation.switch(True)

    def detach(self) -> None:
        """Take it off and free its memory. Idempotent; also after an exception in a step."""
        self._recomputation.switch(False)

    def is_ready(self) -> bool:
        """Return whether warm-up may end; asked once after each of its steps."""
        return True

    def details(self) -> dict[str, Any]:
        """Return what the record of the turn says beyond what all contenders say."""
        return {}

    @contextmanager
    def counting(self, counter: CopyCounter) -> Iterator[None]:
        """Count the copies of the steps inside; after the first step only."""
        yield

    def moved(self, counter: CopyCounter) -> dict[str, Any]:
        """Return what the step under `counting` moved, as fields of a record; wait for the device first."""
        return counter.moved()

    def pinned_bytes(self, torch_pinned_bytes: int, bytes_before: int) -> int:
        """Return the bytes of pinned host memory it holds, by what torch holds now, and held before the turn."""
        return torch_pinned_bytes


class Ours(Contender):
    """The engine, through `megatron_patches`."""

    _handle: Any = None

    def attach(self) -> None:
        import megatron_patches
        from offload_engine import OffloadConfig

        super().attach()
        settings = dict(self.entry.engine)
        budget = settings.pop("gpu_budget", "auto" if self.entry.kind == "budget" else None)
        config = OffloadConfig.from_flags(**settings)
        self._handle = megatron_patches.apply(config, modules=self.entry.modules, gpu_budget=budget)

    def detach(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        super().detach()

    @contextmanager
    def counting(self, counter: CopyCounter) -> Iterator[None]:
        device = self._engine().device
        out, back = device.copy_out, device.copy_in

        def copy_out(stream: Any, copies: Sequence[tuple[torch.Tensor, Any]]) -> Any:
            with counter.copy("out", sum(target.nbytes for _, target in copies), stream):
                return out(stream, copies)

        def copy_in(stream: Any, copies: Sequence[tuple[Any, torch.Tensor]]) -> Any:
            with counter.copy("in", sum(source.nbytes for source, _ in copies), stream):
                return back(stream, copies)

        with mock.patch.multiple(device, copy_out=copy_out, copy_in=copy_in):
            yield

    def moved(self, counter: CopyCounter) -> dict[str, Any]:
        stats = self._engine().stats
        return counter.moved(
            is_confirmed=stats.copied_out_bytes == counter.nbytes["out"] > 0,
            engine=counters_of(stats),
        )

    def pinned_bytes(self, torch_pinned_bytes: int, bytes_before: int) -> int:
        return int(self._engine().pool.slab_bytes_total) + max(0, torch_pinned_bytes - bytes_before)

    def _engine(self) -> Any:
        engine = self._handle.engine if self._handle is not None else None
        if engine is None:
            raise RuntimeError(f"{self.entry.label}: there is no engine before the first step of its turn")
        return engine


class Incumbent(Contender):
    """megatron-core's own offload."""

    def attach(self) -> None:
        if os.environ.get("NVTE_CPU_OFFLOAD_V1") != "1":
            raise RuntimeError("the incumbent needs NVTE_CPU_OFFLOAD_V1=1 in the environment from the start")
        super().attach()
        switch_incumbent(self._chunks, self.entry.modules)
        _manager_class().OFFLOAD_MGR = None  # the first step makes a new one, and records the chunks in it

    def detach(self) -> None:
        from megatron.core.extensions.transformer_engine import cpu_offload

        switch_incumbent(self._chunks, ())
        super().detach()
        _manager_class().OFFLOAD_MGR = None
        if cpu_offload is not None:
            cpu_offload.CPUOffloadEnabled = False  # an exception inside a group leaves it on

    @contextmanager
    def counting(self, counter: CopyCounter) -> Iterator[None]:
        from megatron.core.pipeline_parallel.fine_grained_activation_offload import ChunkOffloadHandler as Handler

        offload, reload = Handler.offload, Handler.reload

        def counted_offload(handler: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            with counter.copy("out", tensor.nbytes, torch.cuda.current_stream()):
                return offload(handler, tensor, *args, **kwargs)

        def counted_reload(handler: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
            with counter.copy("in", state[1].nbytes, torch.cuda.current_stream()):
                return reload(handler, state, *args, **kwargs)

        with mock.patch.multiple(Handler, offload=counted_offload, reload=counted_reload):
            yield


def make_contender(entry: Entry, chunks: Sequence[Any]) -> Contender:
    """Make the contender of an entry of the command line."""
    from .budget import Budget

    return {"budget": Budget, "ours": Ours, "incumbent": Incumbent}.get(entry.kind, Contender)(entry, chunks)


def switch_incumbent(chunks: Sequence[Any], modules: Sequence[str]) -> None:
    """Set megatron-core's own offload to exactly these modules."""
    submodules: list[Any] = [module for chunk in chunks for module in chunk.modules()]
    for config in {id(m.config): m.config for m in submodules if hasattr(m, "config")}.values():
        if hasattr(config, "fine_grained_activation_offloading"):
            config.fine_grained_activation_offloading = bool(modules)
            config.offload_modules = list(modules)
    for module in submodules:
        if hasattr(module, "_set_offload_modules"):  # a layer reads its names from the configuration
            module._set_offload_modules()
            continue
        for attribute in _CACHED.keys() & vars(module).keys():
            setattr(module, attribute, _CACHED[attribute] in modules)
        if "offload_expert_fc1" in vars(module) and hasattr(module.linear_fc1, "save_original_input"):
            module.linear_fc1.save_original_input = "expert_fc1" in modules


def _manager_class() -> Any:
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

    return PipelineOffloadManager
