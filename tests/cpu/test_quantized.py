# SPDX-License-Identifier: Apache-2.0
"""Tensors that hold quantized data: the data and its scales move, weights stay, and the same class comes back."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from offload_engine import (
    CheckpointOffload,
    ChunkOffloadHandler,
    OffloadConfig,
    OffloadEngine,
    enable_activation_offloading,
    manage_activations,
)
from tests.adversarial import AdversarialDevice
from tests.engine_state import release_all
from tests.lookups import import_or_skip

SHAPE = (16, 32)


class Quantized(torch.Tensor):
    """The least that TransformerEngine's quantized tensors have in common, in all its versions; of an unknown name."""

    _data: torch.Tensor | None
    _scale: torch.Tensor | None

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Any:
        wrapper: Any = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32, device=data.device)
        wrapper._data, wrapper._scale = data, scale
        return wrapper

    def prepare_for_saving(self) -> tuple[list[torch.Tensor | None], Quantized]:
        parts = [self._data, None, self._scale]
        self._data = self._scale = None
        return parts, self

    def restore_from_saved(self, tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        self._data, self._scale = tensors[0], tensors[2]
        return tensors[3:]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0]._data, args[0]._scale)
        raise NotImplementedError(func)


class Float8Tensor(Quantized):
    """Stands in for TransformerEngine's class where that is not installed."""


def _quantized(data: torch.Tensor) -> torch.Tensor:
    return Float8Tensor(data, torch.full((8,), 0.5))


def _of_te(module: str, like: torch.Tensor, name: str, fp8: str = "fp8_dtype", /, **fields: Any) -> torch.Tensor:
    """Make a tensor of a class of TransformerEngine; `fp8` is its field for the type of its data."""
    module = f"transformer_engine.pytorch.tensor.{module}_tensor"
    te = import_or_skip(module)
    dtype = pytest.importorskip("transformer_engine_torch").DType
    if fp8:
        fields[fp8] = dtype.kFloat4E2M1 if fp8 == "fp4_dtype" else dtype.kFloat8E4M3
    return getattr(te, name)(shape=like.shape, dtype=torch.float32, device=like.device, **fields)


def _float8(data: torch.Tensor) -> torch.Tensor:
    return _of_te("float8", data, "Float8Tensor", data=data, fp8_scale_inv=torch.full((1,), 0.5))


NO_COLUMNS: dict[str, Any] = {"columnwise_data": None, "columnwise_scale_inv": None, "quantizer": None}


def _blockwise(data: torch.Tensor) -> torch.Tensor:
    rows = {"rowwise_data": data, "rowwise_scale_inv": torch.full((1, 4), 0.5)}
    return _of_te("float8_blockwise", data, "Float8BlockwiseQTensor", **rows, **NO_COLUMNS, is_2D_scaled=False)


def _mxfp8(data: torch.Tensor) -> torch.Tensor:
    rows = {"rowwise_data": data, "rowwise_scale_inv": torch.full((128, 4), 2, dtype=torch.uint8)}
    return _of_te("mxfp8", data, "MXFP8Tensor", **rows, **NO_COLUMNS, with_gemm_swizzled_scales=False)


def _nvfp4(data: torch.Tensor) -> torch.Tensor:
    """Its shape is that of `data`; in truth it has twice as many elements."""
    parts = (data, torch.full((128, 4), 2, dtype=torch.uint8), torch.full((1,), 7.0))
    columns = (data.flatten()[::2].contiguous(), torch.full((4, 128), 3, dtype=torch.uint8), torch.full((1,), 8.0))
    fields: dict[str, Any] = {"quantizer": None, "with_gemm_swizzled_scales": False}
    for way, values in (("rowwise", parts), ("columnwise", columns)):
        fields |= dict(zip((f"{way}_data", f"{way}_scale_inv", f"amax_{way}"), values, strict=True))
    return _of_te("nvfp4", data, "NVFP4Tensor", "fp4_dtype", **fields)


def _hybrid(data: torch.Tensor) -> torch.Tensor:
    te = import_or_skip("transformer_engine.pytorch.tensor")
    parts = {"rowwise_storage": _mxfp8(data), "columnwise_storage": _mxfp8(data + 1)}
    fp8 = pytest.importorskip("transformer_engine_torch").DType.kFloat8E4M3
    rows, columns = (te.MXFP8Quantizer(fp8_dtype=fp8) for _ in range(2))
    quantizer = pytest.importorskip("transformer_engine.pytorch.tensor.hybrid_tensor").HybridQuantizer(
        rowwise_quantizer=rows, columnwise_quantizer=columns
    )
    return _of_te("hybrid", data, "HybridQuantizedTensor", "", **parts, quantizer=quantizer)


def _identity(data: torch.Tensor) -> torch.Tensor:
    return _of_te("identity", data, "IdentityTensor", "", hp_data=data.float())


@pytest.fixture(autouse=True)
def cpu_as_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of TransformerEngine's classes ask for it when they are copied, although they have been given one."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))


CLASSES = pytest.mark.parametrize("make", [_quantized, _float8, _blockwise, _mxfp8, _nvfp4, _hybrid, _identity])


def _parts(tensor: Any) -> list[torch.Tensor]:
    parts, _ = tensor.detach().prepare_for_saving()
    return [part for part in parts if part is not None]


@pytest.fixture
def engine(device: AdversarialDevice) -> Iterator[OffloadEngine]:
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0), device)
    yield engine
    engine.close()


def _save(chunk: ChunkOffloadHandler, tensor: torch.Tensor) -> Any:
    chunk.open_group("linear")
    packed = chunk.hooks.pack(tensor)
    chunk.close_group()
    return packed


@CLASSES
def test_data_and_scales_move_and_the_same_class_comes_back(make: Any, engine: OffloadEngine) -> None:
    tensor = make(torch.randint(0, 100, (2, 8, 32), dtype=torch.uint8))
    kind, parts = type(tensor), [part.clone() for part in _parts(tensor)]
    with engine.iteration():
        chunk = engine.start_chunk()
        packed = _save(chunk, tensor)
        del tensor
        release_all(engine)
        for _ in range(2):  # as a retained graph
            found = chunk.hooks.unpack(packed)
            assert type(found) is kind and all(map(torch.equal, _parts(found), parts)) and parts
        del packed, found
    assert engine.stats.copied_out_bytes == sum(part.nbytes for part in parts)
    assert engine.stats.num_storages_left == 0


@CLASSES
def test_matrices_stay_which_may_be_weights(make: Any, engine: OffloadEngine) -> None:
    weight = make(torch.randint(0, 100, SHAPE, dtype=torch.uint8))
    with engine.iteration():
        chunk = engine.start_chunk()
        assert chunk.hooks.unpack(_save(chunk, weight)) is weight
    assert engine.stats.copied_out_bytes == 0


class NVFP4Tensor(Quantized):
    """Cannot be detached, as a `HybridQuantizedTensor` of storages that are no tensors."""

    __torch_dispatch__ = mock.Mock(side_effect=NotImplementedError)


def _of_experts() -> torch.Tensor:
    """May be the weights of all experts."""
    te, data = import_or_skip("transformer_engine.pytorch.tensor.grouped_tensor"), torch.ones(1024, dtype=torch.uint8)
    return te.GroupedTensor((16, 32), torch.float32, num_tensors=2, shapes=[(8, 32)] * 2, data=data)


@pytest.mark.parametrize("kind", [Quantized, NVFP4Tensor, _of_experts])
def test_what_cannot_be_taken_apart_is_refused_by_name_and_stays(kind: Any, engine: OffloadEngine) -> None:
    tensor = kind() if kind is _of_experts else kind(torch.ones(2, *SHAPE), torch.ones(8))
    warned = pytest.warns(UserWarning, match=f"class {type(tensor).__name__} stay on the device: what they hold is")
    with warned, engine.iteration():
        chunk = engine.start_chunk()
        assert chunk.hooks.unpack(_save(chunk, tensor)) is tensor
    assert engine.stats.copied_out_bytes == 0


class _Multiply(torch.autograd.Function):
    """Saves a quantized tensor whole."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(quantized)
        return x * _parts(quantized)[0].float()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * _parts(ctx.saved_tensors[0])[0].float(), None


class Linear(nn.Module):
    """Gets an input that was quantized outside, as by the module in front."""

    def __init__(self, number: int, call: Any) -> None:
        super().__init__()
        self.quantized, self.call = _quantized(torch.full((2, 8, 32), number, dtype=torch.uint8)), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(_Multiply.apply, x, self.quantized)


@pytest.mark.parametrize("front_end", ["any model", "layers", "checkpoints"])
def test_front_ends_take_them_apart_too(front_end: str) -> None:
    config = OffloadConfig(min_tensor_bytes=0, directory="none")
    handle: Any = CheckpointOffload(config)
    model = nn.Sequential(
        *(Linear(number, handle.checkpoint if front_end == "checkpoints" else operator.call) for number in (2, 3, 5, 7))
    )
    if front_end == "layers":
        handle = enable_activation_offloading(model, layers=list(model), config=config)
    elif front_end == "any model":
        handle = manage_activations(model, group_bytes=1024, config=config)
    source = torch.ones(2, 8, 32, requires_grad=True)
    with handle if front_end == "any model" else nullcontext():
        output = model(source)
    output.sum().backward()
    assert source.grad is not None and (source.grad == 2 * 3 * 5 * 7).all()
    own_bytes = sum(part.nbytes for part in _parts(_quantized(torch.ones(2, 8, 32, dtype=torch.uint8))))
    assert handle.stats.copied_out_bytes >= 2 * own_bytes, "those of some layers stay: their backward is next"
    assert handle.stats.num_storages_left == 0
    handle.engine.close()
