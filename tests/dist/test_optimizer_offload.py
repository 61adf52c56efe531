# SPDX-License-Identifier: Apache-2.0
"""megatron-core's optimizer on the CPU beside offload: together they take no more host memory than there is."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

from megatron_patches import Handle, apply
from megatron_patches._rows.registry import Patch, apply_patches
from megatron_patches._rows.without_gpu import TorchWithoutGpu
from offload_engine._devices.cpu import CpuDevice
from tests.dist.launch import on_ranks
from tests.dist.tiny import ALL, engine_of, make_chunks, make_config, stats_of, step

NAMES = ["self_attn", "mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2"]
NUM_STEPS = 3


class OnHost(torch.Tensor):
    """A copy of a parameter; nothing can be pinned here."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl  # beside `OnGpu` it is a plain tensor

    def pin_memory(self, device: object = None) -> torch.Tensor:
        return self


class OnGpu(torch.Tensor):
    """A parameter, as the optimizer sees it with a GPU."""

    is_cuda = True

    def cpu(self, *_: object) -> torch.Tensor:
        return self.as_subclass(OnHost)


class Host:
    """The memory of a machine, of which the engine and the optimizer take parts."""

    def __init__(self, nbytes: int, handle: Handle | None = None) -> None:
        self.nbytes = nbytes
        self.handle = handle
        self.optimizer: Any = None

    def of_optimizer(self) -> int:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return sum(each.nbytes for each in (*self.optimizer.cpu_copy_map_grad.values(), *states) if each.dim())

    def free(self) -> int:
        engine = self.handle and self.handle.engine
        return self.nbytes - (engine.pool.slab_bytes_total if engine else 0) - self.of_optimizer()


@on_ranks()
def test_both_fit_and_the_engine_gets_what_the_optimizer_leaves() -> None:
    target = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:torch"
    with apply_patches([Patch(target=target, wrapper=TorchWithoutGpu, why="it copies on streams of the GPU")]):
        roomy = Host(1 << 40)
        expected, _ = _train(roomy)
        of_optimizer = roomy.of_optimizer()
        with apply(ALL, modules=NAMES) as handle:
            host = Host(of_optimizer * 5 // 4, handle)
            steps, spared = _train(host)
        assert steps == expected
        assert spared == [of_optimizer, 0, 0]  # what it has taken is not free, and not counted twice


def _train(host: Host) -> tuple[list[dict[str, str]], list[int]]:
    """Return what each step computes, and what the engine leaves to the optimizer in it."""
    chunks = make_chunks(make_config("dense"))
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    mirrors = [p.detach().as_subclass(OnGpu) for p in parameters]
    host.optimizer = HybridDeviceOptimizer(
        [{"params": mirrors}],
        offload_fraction=1.0,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        pin_cpu_grads=False,
        lr=1e-2,
    )
    steps, spared = [], []
    for _ in range(NUM_STEPS):
        with mock.patch.object(CpuDevice, "free_host_bytes", lambda _: host.free()):
            steps.append(step(chunks, 2))
        for mirror, parameter in zip(mirrors, parameters, strict=True):
            mirror.grad = parameter.grad
        host.optimizer.step()
        assert host.free() >= 0, "there is no room for the optimizer"
        if host.handle is not None:
            assert stats_of(host.handle).num_host_limit_groups and stats_of(host.handle).num_offloaded_groups
            spared.append(engine_of(host.handle).pool._slabs.spared_bytes)
    return steps, spared
