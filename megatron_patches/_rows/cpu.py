# SPDX-License-Identifier: Apache-2.0
"""Rows that let megatron-core train on a machine without a GPU, over gloo.

Most rows give one module of megatron-core its own `torch`: the real one, except that the device "cuda" is the CPU and
streams do nothing (everything runs in program order). torch itself is not changed: outside these modules
`torch.cuda.is_available()` is False and a request for a GPU is an error, as before.
Independent of offloading.
"""

from __future__ import annotations

import functools
import importlib
import logging
import types
from collections.abc import Callable
from typing import Any

import torch

from megatron_patches._rows.cpu_fsdp import fsdp_cpu_rows
from megatron_patches._rows.registry import Applied, Patch, apply_patches
from megatron_patches._rows.without_gpu import (
    GPU_TYPE_NAMES,
    NO_RECORD,
    STAY,
    TorchWithoutGpu,
    instead,
    wrap_with_row,
)
from megatron_patches._versions import check_supported


def apply_cpu_support() -> Applied:
    """Apply the rows of this module if there is no GPU; with a GPU apply none.

    Call it before the model is built. `Applied.remove` removes all of them.

    Raises:
        RuntimeError: if megatron-core is missing or its version is not supported.
        PatchError: if the rows are already in force.
    """
    return apply_patches(() if torch.cuda.is_available() else cpu_rows(), version=check_supported())


def cpu_rows() -> list[Patch]:
    """Return all rows of this module."""
    return [
        *_device_rows(),
        *_random_rows(),
        *_communication_rows(),
        *_model_rows(),
        *_moe_rows(),
        *_optimizer_rows(),
        *fsdp_cpu_rows(),
    ]


# ---- devices and streams ---------------------------------------------------------------------------------------------

_ASKS_FOR_CUDA = {
    "utils": "the buffer that attention scores are computed in is created on the GPU",
    "pipeline_parallel.schedules": "the token count of a step is created on the GPU",
    "pipeline_parallel.p2p_communication": "receive buffers are created on the GPU, which is then synchronized",
    "pipeline_parallel.combined_1f1b": "the all-to-all overlap asks for the current GPU stream",
    "pipeline_parallel.utils": "the all-to-all overlap runs its nodes on GPU streams",
    "models.common.model_chunk_schedule_plan": "the all-to-all overlap orders its nodes with GPU events and streams",
    "models.gpt.fine_grained_callables": "the all-to-all overlap labels its nodes with nvtx ranges",
    "tensor_parallel.layers": "gradients of sequence parallelism are scattered into buffers on the GPU",
    "tensor_parallel.mappings": "gather buffers are created on the GPU",
    "tensor_parallel.random": "the states of the RNG tracker are those of the GPU's generator",
    "distributed.param_and_grad_buffer": "gradient and parameter buffers are created on the GPU",
    "optimizer.optimizer": "overflow flags and loss scale are created on the GPU",
    "optimizer.clip_grads": "the gradient norm is created on the GPU",
    "transformer.utils": "the causal mask is created on the GPU",
    "transformer.multi_token_prediction": "the log of its losses is created on the GPU",
    "transformer.moe.router": "the router's weights are moved to the GPU",
    "transformer.moe.token_dispatcher": "split sizes are copied to the host on a GPU stream",
    "transformer.moe.shared_experts": "shared experts may run on a GPU stream of their own",
    "models.common.embeddings.rotary_pos_embedding": "the inverse frequencies are moved to the GPU",
}


def _device_rows() -> list[Patch]:
    return [
        Patch(target=f"megatron.core.{module}:torch", wrapper=TorchWithoutGpu, why=why)
        for module, why in _ASKS_FOR_CUDA.items()
    ]


# ---- random numbers --------------------------------------------------------------------------------------------------


def _random_rows() -> list[Patch]:
    module = "megatron.core.tensor_parallel.random"
    why = "the RNG tracker switches the GPU's generator; without a GPU the dropout masks come from the CPU's"
    return [
        Patch(target=f"{module}:_set_cuda_rng_state", wrapper=functools.partial(instead, _set_rng_state), why=why),
        Patch(
            target=f"{module}:logging",
            wrapper=lambda original: types.SimpleNamespace(getLogger=_quiet_logger),
            why="the tracker warns on every use that the CPU's generator has moved; without a GPU it is meant to",
        ),
    ]


def _quiet_logger(name: str) -> logging.Logger:
    quiet = logging.getLogger(f"{name}.on_cpu")
    quiet.setLevel(logging.ERROR)
    return quiet


def _set_rng_state(new_state: torch.Tensor, device: object = None, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


# ---- gloo ------------------------------------------------------------------------------------------------------------


def _communication_rows() -> list[Patch]:
    module = "megatron.core.pipeline_parallel.p2p_communication"
    why = (
        "gloo reads a sent tensor after isend has returned, and the schedule frees a stage's output right after it "
        "(deallocate_pipeline_outputs): send a copy"
    )
    # not _batched_p2p_ops: its callers wait for the sends
    return [Patch(target=f"{module}:_p2p_ops", wrapper=_send_copies, why=why)]


def _send_copies(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def send(**kwargs: Any) -> Any:
        for name in ("tensor_send_prev", "tensor_send_next"):
            if kwargs[name] is not None:
                kwargs[name] = kwargs[name].detach().clone()
        return original(**kwargs)

    return send


# ---- model -----------------------------------------------------------------------------------------------------------


def _model_rows() -> list[Patch]:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    return [
        Patch(
            target="megatron.core.transformer.transformer_block:LayerNormImpl",
            wrapper=functools.partial(instead, WrappedTorchNorm),
            why="if TransformerEngine can be imported, the norm after the last layer is its own, for GPUs only",
        ),
        Patch(
            target="megatron.core.models.common.language_module.language_module:"
            "LanguageModule.setup_embeddings_and_output_layer",
            wrapper=functools.partial(wrap_with_row, STAY),
            why="the last stage's copy of the word embeddings is moved to the GPU",
        ),
        Patch(
            target="megatron.core.transformer.multi_latent_attention:TELinear",
            wrapper=lambda original: original if isinstance(original, type) else type("TELinear", (), {}),
            why="without TransformerEngine it is not a class, and 0.16.1 tests whether a projection is an instance",
        ),
        Patch(
            target="megatron.core.tensor_parallel.random:CheckpointWithoutOutput.__init__",
            wrapper=_wrap_without_fp8,
            why="reads TransformerEngine's fp8 state by default: needs a GPU with it, and is undefined without it",
        ),
    ]


def _wrap_without_fp8(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.fp8 = False

    return init


# ---- mixture of experts ----------------------------------------------------------------------------------------------


def _moe_rows() -> list[Patch]:
    moe = "megatron.core.transformer.moe"
    return [
        Patch(
            target=f"{moe}.moe_utils:te_general_gemm",
            wrapper=functools.partial(instead, None),
            why="TransformerEngine's matrix product runs on GPUs only; without it 0.16.1 leaves the name undefined",
            is_new=not _is_defined(f"{moe}.moe_utils", "te_general_gemm"),
        ),
        Patch(
            target=f"{moe}.token_dispatcher:maybe_move_tensor_to_cpu",
            wrapper=_splits_as_numpy,
            why="split sizes become numpy arrays only when they come from a GPU; gloo takes nothing else",
        ),
        *(
            Patch(
                target=f"megatron.core.pipeline_parallel.utils:ScheduleNode.{name}",
                wrapper=functools.partial(wrap_with_row, NO_RECORD),
                why="the all-to-all overlap calls record_stream on the tensors that its nodes exchange",
            )
            for name in ("_forward", "_backward")
        ),
    ]


def _is_defined(module: str, name: str) -> bool:
    return hasattr(importlib.import_module(module), name)


def _splits_as_numpy(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.detach().numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    return move


# ---- optimizer -------------------------------------------------------------------------------------------------------


def _optimizer_rows() -> list[Patch]:
    optimizer = "megatron.core.optimizer"
    why = "parameters and gradients are distinguished by type names that begin with torch.cuda"
    by_type_name = (
        "optimizer:Float16OptimizerWithFloat16Params.__init__",
        "optimizer:clip_grad_by_total_norm_fp32",
        "distrib_optimizer:DistributedOptimizer.__init__",
    )
    return [
        *(
            Patch(target=f"{optimizer}.{target}", wrapper=functools.partial(wrap_with_row, GPU_TYPE_NAMES), why=why)
            for target in by_type_name
        ),
        *_fused_kernel_rows(optimizer),
    ]


def _fused_kernel_rows(optimizer: str) -> list[Patch]:
    from megatron.core import utils

    why = "TransformerEngine's and apex' fused kernels run on GPUs only"
    on_cpu = {
        ":SGD": torch.optim.SGD,
        ":USING_PYTORCH_OPTIMIZER": True,
        ".clip_grads:multi_tensor_scale_impl": utils.local_multi_tensor_scale,
        ".clip_grads:l2_norm_impl": utils.local_multi_tensor_l2_norm,
    }
    return [
        *(
            Patch(target=optimizer + target, wrapper=functools.partial(instead, replacement), why=why)
            for target, replacement in on_cpu.items()
        ),
        Patch(
            target=f"{optimizer}.clip_grads:multi_tensor_scale_tensor_impl",
            wrapper=functools.partial(instead, None),
            why=why,
            versions=">=0.17",
        ),
    ]
