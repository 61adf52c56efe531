# SPDX-License-Identifier: Apache-2.0
"""The weights of a model: looked up in time, and their gradients added by a kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.tensor_parallel import layers

from megatron_patches import Handle, apply
from megatron_patches._rows.registry import Patch, apply_patches
from megatron_patches._rows.without_gpu import TorchWithoutGpu
from offload_engine import OffloadEngine
from offload_engine._devices.cpu import CpuDevice
from tests.dist.launch import on_ranks
from tests.dist.tiny import ALL, engine_of, make_chunks, make_config, run, stats_of, step, train_distributed


@pytest.mark.compat
@on_ranks()
def test_a_parameter_that_takes_the_place_of_another_is_known_a_step_later() -> None:
    expected = step(make_chunks(make_config()), 2)
    (chunk,) = chunks = make_chunks(make_config())
    begin = OffloadEngine.begin_iteration
    told: list[list[int]] = []

    def noted(engine: Any, actions: Any, weights: Iterable[torch.Tensor], **more: Any) -> None:
        told.append([tensor.data_ptr() for tensor in weights])
        begin(engine, actions, weights, **more)

    with apply(ALL, modules=["qkv_linear"]), mock.patch.object(OffloadEngine, "begin_iteration", noted):
        run(chunks, 2)
        linear: Any = chunk.decoder.layers[0].self_attention.linear_qkv
        linear.weight = torch.nn.Parameter(linear.weight.detach().clone())
        assert [step(chunks, 2) for _ in range(2)] == [expected, expected]
    assert [linear.weight.data_ptr() in weights for weights in told[1:]] == [False, True]


# -- gradients that a linear layer adds to `main_grad` itself: it finds the same parameter object in backward ----------

FUSED = {"gradient_accumulation_fusion": True}
NAMES = ["qkv_linear", "core_attn", "attn_proj", "mlp_fc1", "mlp_act", "mlp_fc2"]


@pytest.mark.compat
@on_ranks(world_size=2)
def test_every_weight_says_that_its_gradient_was_added() -> None:
    """Every parameter gets a gradient, which data parallelism wants although it is not read."""
    weights: list[Any] = []

    def steps() -> list[dict[str, str]]:
        config = make_config("dense", torch.bfloat16, **FUSED)
        (chunk,) = chunks = make_chunks(config)
        linears = (layers.ColumnParallelLinear, layers.RowParallelLinear)
        weights[:] = [module.weight for module in chunk.modules() if isinstance(module, linears)]
        return train_distributed(config, chunks, lambda chunks: step(chunks, 3))

    with kernels() as kernel:
        expected = steps()
        kernel.reset_mock()
        with apply(ALL, modules=NAMES) as handle:
            assert steps() == expected
            assert stats_of(handle).copied_out_bytes > 0
    assert kernel.call_count == 3 * len(expected) * len(weights) > 0
    assert all(weight.grad_added_to_main_grad and weight.main_grad.any() for weight in weights)


@contextmanager
def kernels() -> Iterator[mock.Mock]:
    """In the place of apex's module; what it gives counts the calls."""
    kernel = mock.Mock(side_effect=lambda inputs, grad, main_grad: main_grad.add_(grad.float().t() @ inputs.float()))
    names: dict[str, Any] = {"fused_weight_gradient_mlp_cuda": SimpleNamespace(wgrad_gemm_accum_fp32=kernel)}
    # TransformerEngine would make the unread gradient on the GPU.
    with mock.patch.multiple(layers, create=True, **names, _grad_accum_fusion_available=True, HAVE_TE=False):
        yield kernel


# -- megatron-core's optimizer on the CPU beside offload: together they take no more host memory than there is ---------

OF_LAYERS = ["self_attn", "mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2"]
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
        expected, _ = _train_on_host(roomy)
        of_optimizer = roomy.of_optimizer()
        with apply(ALL, modules=OF_LAYERS) as handle:
            host = Host(of_optimizer * 5 // 4, handle)
            steps, spared = _train_on_host(host)
        assert steps == expected
        assert spared == [of_optimizer, 0, 0]  # what it has taken is not free, and not counted twice


def _train_on_host(host: Host) -> tuple[list[dict[str, str]], list[int]]:
    """Return what each step computes, and what the engine leaves to the optimizer in it."""
    chunks = make_chunks(make_config("dense"))
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    mirrors = [p.detach().as_subclass(OnGpu) for p in parameters]
    classes: Any = dict.fromkeys(("cpu_optimizer_cls", "gpu_optimizer_cls"), torch.optim.AdamW)
    host.optimizer = HybridDeviceOptimizer(
        [{"params": mirrors}], offload_fraction=1.0, pin_cpu_grads=False, lr=1e-2, **classes
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
