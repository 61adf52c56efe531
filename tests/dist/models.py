# SPDX-License-Identifier: Apache-2.0
"""Tiny models beside the plain GPT: latent attention, multi-token prediction, single sublayers, frozen in part."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state as ps
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import experts
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

LATENT: dict[str, Any] = {"multi_latent_attention": True, "qk_layernorm": True, "rope_type": "rope"}
LATENT |= {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}
"""Settings of multi-latent attention, with norms of their own for its latents."""

HYBRID: dict[str, Any] = dict(is_hybrid_model=True)
"""Settings of a stack of Mamba, attention, dense and MoE sublayers, in turns."""

_SUBLAYERS = "M*-E"


class Norm(torch.nn.LayerNorm):
    """torch's, which megatron-core wraps in a class that refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)


class GroupedLinear(torch.nn.Module):
    """All experts' projections in one call, as TransformerEngine's class of this name, which needs a GPU."""

    def __init__(self, num_experts: int, size_in: int, size_out: int, **options: Any) -> None:
        super().__init__()
        self.num_gemms = num_experts
        self.save_original_input = False
        weights = [torch.nn.Parameter(torch.empty(size_out, size_in)) for _ in range(num_experts)]
        self.weights = torch.nn.ParameterList(weights)
        for weight in weights:
            options["init_method"](weight)
            weight.allreduce = False  # type: ignore[attr-defined]  # each rank has experts of its own

    def forward(self, tokens: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, None]:
        return GroupedProduct.apply(tokens, counts, self.save_original_input, *self.weights), None

    forward.__module__ = "transformer_engine.pytorch"  # of others' forwards it is not known what they save


class GroupedProduct(torch.autograd.Function):
    """Saves what TransformerEngine's saves, in its order."""

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, counts: list[int], save_original_input: bool, *weights: torch.Tensor
    ) -> torch.Tensor:
        parts = tokens.split(counts)
        ctx.counts, ctx.is_original = counts, save_original_input
        ctx.save_for_backward(*([tokens] if save_original_input else parts), *weights)
        return torch.cat([part @ weight.t() for part, weight in zip(parts, weights, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        num_experts = len(ctx.counts)
        inputs, weights = ctx.saved_tensors[:-num_experts], ctx.saved_tensors[-num_experts:]
        parts = inputs[0].split(ctx.counts) if ctx.is_original else inputs
        outputs = grads[0].split(ctx.counts)
        of_weights = [output.t() @ part for output, part in zip(outputs, parts, strict=True)]
        of_tokens = [output @ weight for output, weight in zip(outputs, weights, strict=True)]
        return torch.cat(of_tokens), None, None, *of_weights


def _grouped_experts(provider: Any, use_grouped_gemm: bool, *legacy: bool) -> Any:
    """Instead of `LocalSpecProvider.grouped_mlp_modules`."""
    if legacy:  # 0.16
        return experts.TEGroupedMLP, MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
    submodules = experts.GroupedMLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
    return functools.partial(experts.TEGroupedMLP, submodules=submodules)


class CoreAttention(DotProductAttention):
    """Megatron-core's own, where it asks for TransformerEngine's: with latents, and with context parallelism.

    With the latter each rank gathers the keys and values of all, as `cp_comm_type="all_gather"` does.
    """

    def __init__(
        self, config: TransformerConfig, *args: Any, k_channels: object = None, v_channels: object = None, **kwargs: Any
    ) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1  # else it refuses
        super().__init__(alone, *args, **kwargs)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        return super().forward(query, _whole_sequence(key), _whole_sequence(value), mask, **kwargs)


def _whole_sequence(part: torch.Tensor) -> torch.Tensor:
    """Of each rank's two slices, one from the front and one as far from the end, which balance its work."""
    group = ps.get_context_parallel_group()
    if group.size() == 1:
        return part
    slices = gather_from_sequence_parallel_region(part, group=group).chunk(2 * group.size())
    return torch.cat([*slices[::2], *reversed(slices[1::2])])


class Mixer(torch.nn.Module):
    """In place of a Mamba mixer, whose kernels need a GPU: a gated sum over the sequence between two projections."""

    def __init__(self, config: TransformerConfig, d_model: int, **_: Any) -> None:
        super().__init__()
        common: dict[str, Any] = dict(config=config, init_method=config.init_method, bias=False)
        self.in_proj = ColumnParallelLinear(d_model, 2 * d_model, gather_output=False, **common)
        self.out_proj = RowParallelLinear(d_model, d_model, input_is_parallel=True, skip_bias_add=True, **common)

    def forward(self, hidden: torch.Tensor, **_: Any) -> Any:
        values, gates = self.in_proj(hidden)[0].chunk(2, dim=-1)
        return self.out_proj(torch.cumsum(values * gates.sigmoid(), dim=0))


def make_model(config: TransformerConfig, stage: int | None, **common: Any) -> torch.nn.Module:
    """Return the model chunk of virtual stage `stage`."""
    if config.moe_grouped_gemm:
        with mock.patch.object(LocalSpecProvider, "grouped_mlp_modules", _grouped_experts):
            return _gpt(config, stage, **common)
    return _hybrid(config, stage, **common) if config.is_hybrid_model else _gpt(config, stage, **common)


def _gpt(config: TransformerConfig, stage: int | None, **common: Any) -> torch.nn.Module:
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage)
    for layer in spec.layer_specs:
        _adapt(layer, config)
    if config.sequence_parallel:
        spec.layer_norm = Norm
    if config.mtp_num_layers:
        layer = gpt_layer_specs.get_gpt_decoder_layer_specs(config, False, None, False)[-1]
        _adapt(layer, config)
        common["mtp_block_spec"] = gpt_layer_specs.get_gpt_mtp_block_spec(
            config, spec if spec.layer_specs else layer, use_transformer_engine=False, vp_stage=stage
        )
    return GPTModel(config, spec, vp_stage=stage, **common)


def _adapt(layer: ModuleSpec, config: TransformerConfig) -> None:
    if config.multi_latent_attention or config.context_parallel_size > 1:
        layer.submodules.self_attention.submodules.core_attention = CoreAttention
    if config.sequence_parallel:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    if getattr(config, "enable_mhc_connections", False):
        from megatron.core.transformer.hyper_connection import HyperConnectionModule
        from megatron.core.transformer.transformer_layer import HyperConnectionTransformerLayer

        layer.module = HyperConnectionTransformerLayer
        layer.submodules.self_attention_hyper_connection = HyperConnectionModule
        layer.submodules.mlp_hyper_connection = HyperConnectionModule


def _hybrid(config: TransformerConfig, stage: int | None, **common: Any) -> torch.nn.Module:
    stack, submodules, model, pattern = _hybrid_classes()
    whole = gpt_layer_specs.get_gpt_layer_local_spec().submodules
    moe = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    attention = TransformerLayerSubmodules(
        input_layernorm=whole.input_layernorm, self_attention=whole.self_attention, self_attn_bda=whole.self_attn_bda
    )
    mamba = MambaLayerSubmodules(norm=whole.input_layernorm, mixer=Mixer, mamba_bda=get_bias_dropout_add)
    parts = {
        "mamba_layer": (MambaLayer, mamba),
        "attention_layer": (TransformerLayer, attention),
        "mlp_layer": (MLPLayer, _only_mlp(whole, whole.mlp)),
        "moe_layer": (TransformerLayer, _only_mlp(whole, moe)),
    }
    layers = {name: ModuleSpec(module=module, submodules=inner) for name, (module, inner) in parts.items()}
    # the norm behind the last layer is TransformerEngine's
    spec = ModuleSpec(module=stack, params={"post_layer_norm": False}, submodules=submodules(**layers))
    if "vp_stage" in inspect.signature(model).parameters:
        common["vp_stage"] = stage
    return model(config, spec, **{pattern: _pattern(pattern, config.num_layers)}, **common)


def _hybrid_classes() -> tuple[Any, Any, Any, str]:
    try:
        from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
        from megatron.core.models.hybrid.hybrid_model import HybridModel
    except ImportError:  # before 0.18
        from megatron.core.models.mamba import MambaModel
        from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules

        return MambaStack, MambaStackSubmodules, MambaModel, "hybrid_override_pattern"
    return HybridStack, HybridStackSubmodules, HybridModel, "hybrid_layer_pattern"


def _only_mlp(whole: Any, mlp: Any) -> TransformerLayerSubmodules:
    return TransformerLayerSubmodules(pre_mlp_layernorm=whole.pre_mlp_layernorm, mlp=mlp, mlp_bda=whole.mlp_bda)


def _pattern(argument: str, num_layers: int) -> str:
    sublayers = (_SUBLAYERS * num_layers)[:num_layers]
    if argument == "hybrid_override_pattern":
        return sublayers
    stages = ps.get_pipeline_model_parallel_world_size() * (ps.get_virtual_pipeline_model_parallel_world_size() or 1)
    length = num_layers // stages
    return "|".join(sublayers[i : i + length] for i in range(0, num_layers, length))


def delay_weight_gradients(chunk: torch.nn.Module) -> None:
    """Make linear layers compute the gradient of their weight in `backward_dw`, as TransformerEngine's do.

    megatron-core's own do nothing there. For tensor-parallel size 1, without biases.
    """
    for layer in chunk.modules():
        if isinstance(layer, TransformerLayer):
            for module in layer.modules():
                if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                    assert module.bias is None, "biases are not delayed"
                    _delay(module)


def _delay(module: Any) -> None:
    pending: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(inputs: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return _DelayedLinear.apply(inputs, module.weight, pending), None

    @torch.no_grad()
    def backward_dw() -> None:
        for inputs, grad in pending:
            flat = inputs.reshape(-1, inputs.shape[-1])
            module.weight.main_grad.add_(grad.reshape(-1, grad.shape[-1]).t().matmul(flat))
        pending.clear()

    module.forward = forward
    module.backward_dw = backward_dw


class _DelayedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, pending: list[Any]) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.pending = pending
        return inputs.matmul(weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        inputs, weight = ctx.saved_tensors
        ctx.pending.append((inputs, grads[0]))  # read after this node, and its saved tensors, are gone
        return grads[0].matmul(weight), None, None


# -- models of which only a part is trained ---------------------------------------------------------------------------


class Adapted(torch.nn.Module):
    """A linear layer of megatron-core with a low-rank adapter beside it."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        size_out, size_in = linear.weight.shape
        options: Any = {"bias": False, "dtype": linear.weight.dtype}
        self.linear = linear
        self.adapter = torch.nn.Sequential(
            torch.nn.Linear(size_in, 4, **options), torch.nn.Linear(4, size_out, **options)
        )

    def forward(self, hidden: torch.Tensor) -> Any:
        output, bias = self.linear(hidden)
        return output + self.adapter(hidden), bias


def adapters(chunk: torch.nn.Module, *more: str) -> None:
    for module in list(chunk.modules()):
        for name, child in list(module.named_children()):
            if name in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"):
                setattr(module, name, Adapted(child))
    _freeze(chunk, lambda name: not any(part in name for part in (".adapter.", *more)))


def adapters_and_embedding(chunk: torch.nn.Module) -> None:
    adapters(chunk, "embedding.")


def routers(chunk: torch.nn.Module) -> None:
    _freeze(chunk, lambda name: ".router." not in name)


def all_but_experts(chunk: torch.nn.Module) -> None:
    _freeze(chunk, lambda name: ".experts." in name)


def last_layers(chunk: Any) -> None:
    """Train the last layers only: the input of the first of them needs no gradient."""
    chunk.requires_grad_(False)
    for layer in chunk.decoder.layers:
        layer.requires_grad_(layer.layer_number > layer.config.num_layers // 2)


def _freeze(chunk: torch.nn.Module, is_frozen: Callable[[str], bool]) -> None:
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_(not is_frozen(name))
