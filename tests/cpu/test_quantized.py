# SPDX-License-Identifier: Apache-2.0
"""Tensors that hold quantized data: the data and its scales move, weights stay, and the same class comes back."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from offload_engine import (
    CheckpointOffload,
    OffloadConfig,
    OffloadEngine,
    ResidencyMeter,
    group_commit,
)
from tests.adversarial import AdversarialDevice
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
    return _of_te(
        "nvfp4",
        data,
        "NVFP4Tensor",
        "fp4_dtype",
        rowwise_data=data,
        rowwise_scale_inv=torch.full((128, 4), 2, dtype=torch.uint8),
        columnwise_data=data.flatten()[::2].contiguous(),
        columnwise_scale_inv=torch.full((4, 128), 3, dtype=torch.uint8),
        amax_rowwise=torch.full((1,), 7.0),
        amax_columnwise=torch.full((1,), 8.0),
        quantizer=None,
        with_gemm_swizzled_scales=False,
    )


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


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return make((source * 100).to(torch.uint8))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _Multiply(torch.autograd.Function):
    """Saves two quantized tensors whole, and notes what comes back, part by part."""

    @staticmethod
    def forward(ctx: Any, activation: Any, weight: Any, seen: list[Any]) -> torch.Tensor:
        ctx.save_for_backward(activation, weight)
        ctx.seen = seen
        return _parts(activation)[0].float().clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        activation, weight = ctx.saved_tensors
        parts = _parts(activation)
        ctx.seen += [type(activation), weight, [part.clone() for part in parts]]
        return grads[0] * parts[0].float() * _parts(weight)[0].float(), None, None


def _run(engine: OffloadEngine, source: torch.Tensor, weight: torch.Tensor, make: Any) -> list[Any]:
    """Return the gradient of `source`, twice through one retained graph; what backward saw goes in front of it."""
    seen: list[Any] = []
    chunk = engine.start_chunk()
    activation = _Quantize.apply(source, make)
    chunk.open_group("linear")
    with chunk.saved_tensors_hooks():
        output = _Multiply.apply(activation, weight, seen)
    output = group_commit(output, chunk)
    del activation
    chunk.open_group("next")
    with chunk.saved_tensors_hooks():
        output = output.sin()
    output = group_commit(output, chunk)  # releases what came before
    for _ in range(2):
        seen += torch.autograd.grad(output.sum(), source, retain_graph=True)
    return seen


@CLASSES
@pytest.mark.parametrize("shape", [SHAPE, (2, 8, 32)])
def test_data_and_scales_move_but_for_matrices_which_may_be_weights(make: Any, shape: tuple[int, ...]) -> None:
    source = torch.rand(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    weight = make(torch.randint(0, 100, SHAPE if len(shape) == 2 else (8, 32), dtype=torch.uint8))
    engines = [
        OffloadEngine(OffloadConfig(min_tensor_bytes=0, dry_run=dry), AdversarialDevice(), ResidencyMeter())
        for dry in (True, False)
    ]
    results = []
    for engine in engines:
        with engine.iteration():
            results.append(_run(engine, source, weight, make))
        engine.close()
    plain, moved = results
    for kind, same, parts, grad in (moved[0:4], moved[4:8]):
        assert kind is type(weight) and same is weight
        assert all(map(torch.equal, parts, plain[2])) and len(parts) == len(plain[2]) > 0
        assert torch.equal(grad, plain[3])
    parts_bytes = sum(part.nbytes for part in plain[2]) if len(shape) > 2 else 0
    stats = engines[1].stats
    output_bytes = 4 * source.numel()  # the next group's
    assert stats.copied_out_bytes == parts_bytes + output_bytes and stats.num_storages_left == 0


class NVFP4Tensor(Quantized):
    """Cannot be detached, as a `HybridQuantizedTensor` of storages that are no tensors."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(func)


def _of_experts() -> torch.Tensor:
    """May be the weights of all experts."""
    te, data = import_or_skip("transformer_engine.pytorch.tensor.grouped_tensor"), torch.ones(1024, dtype=torch.uint8)
    return te.GroupedTensor((16, 32), torch.float32, num_tensors=2, shapes=[(8, 32)] * 2, data=data)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Quantized(torch.ones(2, *SHAPE), torch.ones(8)), "Quantized"),
        (lambda: NVFP4Tensor(torch.ones(2, *SHAPE), torch.ones(8)), "NVFP4Tensor"),
        (_of_experts, "GroupedTensor"),
    ],
)
def test_what_cannot_be_taken_apart_is_refused_by_name_and_stays(make: Callable[[], torch.Tensor], name: str) -> None:
    tensor, engine = make(), OffloadEngine(OffloadConfig(min_tensor_bytes=0), AdversarialDevice())
    with pytest.warns(UserWarning, match=f"class {name} stay on the device: what they hold is"), engine.iteration():
        chunk = engine.start_chunk()
        chunk.open_group("linear")
        assert chunk.hooks.unpack(chunk.hooks.pack(tensor)) is tensor
        chunk.close_group()
    assert engine.stats.copied_out_bytes == 0
    engine.close()


def test_inputs_of_checkpoints_are_taken_apart_too() -> None:
    """They are quantized outside, as by the module in front."""
    seen: list[Any] = []
    checkpoints = CheckpointOffload(OffloadConfig(min_tensor_bytes=0, directory="none"))
    weights = [_quantized(torch.ones((1, 32), dtype=torch.uint8)) for _ in range(6)]

    def gradient(call: Callable[..., torch.Tensor]) -> torch.Tensor:
        output = source = torch.rand((2, 8, 32), generator=torch.Generator().manual_seed(1)).requires_grad_()
        for weight in weights:
            quantized = _Quantize.apply(output, _quantized)
            output = call(lambda a, weight=weight: _Multiply.apply(a, weight, seen), quantized) / 100
        return torch.autograd.grad(output.sum(), source)[0]

    expected = gradient(partial(torch_checkpoint, use_reentrant=False))
    assert torch.equal(gradient(checkpoints.checkpoint), expected)
    half = len(seen) // 2
    for before, after in zip(seen[2:half:3], seen[half + 2 :: 3], strict=True):
        assert all(map(torch.equal, before, after)) and len(before) == len(after)
    assert all(map(operator.is_, seen[half + 1 :: 3], reversed(weights))), "the same objects"
    own_bytes = sum(part.nbytes for part in seen[2])
    assert checkpoints.stats.copied_out_bytes >= 2 * own_bytes, "those of some layers stay: their backward is next"
    assert checkpoints.stats.num_storages_left == 0
    checkpoints.engine.close()
