# SPDX-License-Identifier: Apache-2.0
"""Stands in for TransformerEngine's modules, which need a GPU: same parameters, same saved tensors."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.utils import divide

from megatron_patches._rehearsal.kernels import Attention, GroupedLinear, Linear, Norm, Tokens


class RehearsedNorm(torch.nn.Module):
    """TENorm."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = _parameter(config, hidden_size)
        self.bias = _parameter(config, hidden_size) if config.normalization == "LayerNorm" else None
        _mark_split(config, self.weight, self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Norm.apply(x, self.weight, self.bias)


class _LinearBase(torch.nn.Module):
    mode = "duplicated"
    has_norm = False

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        bias: bool,
        skip_bias_add: bool = False,
        is_expert: bool = False,
        tp_group: Any = None,
        parallel_mode: str | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.config = config
        mode = self.mode if parallel_mode is None else parallel_mode
        group = _group(tp_group, is_expert)
        size = 1 if mode == "duplicated" or group is None else group.size()
        rows = divide(output_size, size) if mode == "column" else output_size
        columns = divide(input_size, size) if mode == "row" else input_size
        self.weight = _parameter(config, rows, columns)
        self.layer_norm_weight = _parameter(config, input_size) if self.has_norm else None
        is_layer_norm = self.has_norm and config.normalization == "LayerNorm"
        self.layer_norm_bias = _parameter(config, input_size) if is_layer_norm else None
        self.bias = _parameter(config, rows) if bias else None
        self._returns_bias = skip_bias_add
        if is_expert:
            _mark_expert(config, self.parameters())
        is_split = config.sequence_parallel and not is_expert
        self._how = Tokens(None if is_expert else group, mode, is_split, 2 if is_layer_norm else 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        out = Linear.apply(x, self.weight, self.layer_norm_weight, self._how)
        if self.bias is None or self._returns_bias:
            return out, self.bias
        return out + self.bias, None


class RehearsedLinear(_LinearBase):
    """TELinear."""


class RehearsedColumnLinear(_LinearBase):
    """TEColumnParallelLinear."""

    mode = "column"


class RehearsedRowLinear(_LinearBase):
    """TERowParallelLinear."""

    mode = "row"


class RehearsedNormLinear(_LinearBase):
    """TELayerNormColumnParallelLinear."""

    mode = "column"
    has_norm = True


class RehearsedGroupedLinear(torch.nn.Module):
    """TEGroupedLinear."""

    splits_output = True

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, config: Any, pg_collection: Any = None, **_: Any
    ) -> None:
        super().__init__()
        size = 1 if pg_collection is None else pg_collection.expt_tp.size()
        rows = divide(output_size, size) if self.splits_output else output_size
        columns = input_size if self.splits_output else divide(input_size, size)
        for index in range(num_gemms):
            self.register_parameter(f"weight{index}", _parameter(config, rows, columns))
        _mark_expert(config, self.parameters())

    def forward(self, x: torch.Tensor, m_splits: Any) -> tuple[torch.Tensor, None]:
        return GroupedLinear.apply(x, *self.parameters()), None


class RehearsedColumnGroupedLinear(RehearsedGroupedLinear):
    """TEColumnParallelGroupedLinear."""


class RehearsedRowGroupedLinear(RehearsedGroupedLinear):
    """TERowParallelGroupedLinear."""

    splits_output = False


class RehearsedAttention(torch.nn.Module):
    """Stands in for TEDotProductAttention, with kernels that never store the matrix of scores."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, *_: Any, **__: Any) -> None:
        super().__init__()
        self.config = config
        self._is_causal = "causal" in attn_mask_type.name

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        query, key, value = (t.contiguous() for t in (query, key, value))
        out = Attention.apply(query, key, value, self._is_causal)
        return out.reshape(*out.shape[:2], -1)


class RehearsedSpecProvider(LocalSpecProvider):
    """Provides stand-ins for the modules of a layer with TransformerEngine."""

    def linear(self) -> type:
        return RehearsedLinear

    def column_parallel_linear(self) -> type:
        return RehearsedColumnLinear

    def row_parallel_linear(self) -> type:
        return RehearsedRowLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return RehearsedNormLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return RehearsedNorm

    def core_attention(self) -> type:
        return RehearsedAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, *legacy: Any, **_: Any) -> Any:
        return _experts(moe_use_grouped_gemm, is_pair=bool(legacy) or bool(_))


def _experts(is_grouped: bool, is_pair: bool) -> Any:
    """Return the class of the experts and its submodules: a pair up to 0.16, one factory since."""
    from functools import partial

    from megatron.core.transformer.moe import experts

    linears = (
        {"linear_fc1": RehearsedColumnGroupedLinear, "linear_fc2": RehearsedRowGroupedLinear}
        if is_grouped
        else {"linear_fc1": RehearsedColumnLinear, "linear_fc2": RehearsedRowLinear}
    )
    kind = experts.TEGroupedMLP if is_grouped else experts.SequentialMLP
    if is_pair:
        return kind, MLPSubmodules(**linears)
    holder = getattr(experts, "GroupedMLPSubmodules", MLPSubmodules) if is_grouped else MLPSubmodules
    return partial(kind, submodules=holder(**linears))


def _parameter(config: Any, *shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))


def _group(given: Any, is_expert: bool) -> Any:
    from megatron.core import parallel_state

    if given is not None:
        return given
    get = (
        parallel_state.get_expert_tensor_parallel_group if is_expert else parallel_state.get_tensor_model_parallel_group
    )
    return get(check_initialized=False)


def _mark_split(config: Any, *parameters: torch.nn.Parameter | None) -> None:
    for parameter in parameters:
        if parameter is not None:
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def _mark_expert(config: Any, parameters: Any) -> None:
    for parameter in parameters:
        parameter.allreduce = config.expert_model_parallel_size == 1
