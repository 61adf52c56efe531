# SPDX-License-Identifier: Apache-2.0
"""Tensors that hold quantized data: the data and its scales move, weights stay, and the same class comes back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from offload_engine import (
    CheckpointOffload,
    OffloadConfig,
    OffloadEngine,
    ResidencyMeter,
    enable_activation_offloading,
    group_commit,
    manage_activations,
)
from tests.adversarial import AdversarialDevice

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
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0]._data, args[0]._scale)
        raise NotImplementedError(func)


class Float8Tensor(Quantized):
    """Stands in for TransformerEngine's class where that is not installed."""


def _quantized(data: torch.Tensor) -> torch.Tensor:
    return Float8Tensor(data, torch.full((8,), 0.5))


def _of_te(name: str) -> Any:
    """Return a module of TransformerEngine's tensors, and its compiled one."""
    module = f"transformer_engine.pytorch.tensor.{name}_tensor"
    te = pytest.importorskip(module, exc_type=Exception)  # type: ignore[call-overload]
    return te, pytest.importorskip("transformer_engine_torch")


def _float8(data: torch.Tensor) -> torch.Tensor:
    te, tex = _of_te("float8")
    return te.Float8Tensor(
        shape=data.shape,
        dtype=torch.float32,
        data=data,
        fp8_scale_inv=torch.full((1,), 0.5),
        fp8_dtype=tex.DType.kFloat8E4M3,
        device=data.device,
    )


def _blockwise(data: torch.Tensor) -> torch.Tensor:
    te, tex = _of_te("float8_blockwise")
    return te.Float8BlockwiseQTensor(
        shape=data.shape,
        dtype=torch.float32,
        rowwise_data=data,
        rowwise_scale_inv=torch.full((1, 4), 0.5),
        columnwise_data=None,
        columnwise_scale_inv=None,
        fp8_dtype=tex.DType.kFloat8E4M3,
        quantizer=None,
        is_2D_scaled=False,
        device=data.device,
    )


def _mxfp8(data: torch.Tensor) -> torch.Tensor:
    te, tex = _of_te("mxfp8")
    return te.MXFP8Tensor(
        shape=data.shape,
        dtype=torch.float32,
        rowwise_data=data,
        rowwise_scale_inv=torch.full((128, 4), 2, dtype=torch.uint8),
        columnwise_data=None,
        columnwise_scale_inv=None,
        fp8_dtype=tex.DType.kFloat8E4M3,
        quantizer=None,
        with_gemm_swizzled_scales=False,
        device=data.device,
    )


def _nvfp4(data: torch.Tensor) -> torch.Tensor:
    te, tex = _of_te("nvfp4")
    return te.NVFP4Tensor(
        shape=data.shape,  # twice as many elements in truth
        dtype=torch.float32,
        rowwise_data=data,
        rowwise_scale_inv=torch.full((128, 4), 2, dtype=torch.uint8),
        columnwise_data=data.flatten()[::2].contiguous(),
        columnwise_scale_inv=torch.full((4, 128), 3, dtype=torch.uint8),
        amax_rowwise=torch.full((1,), 7.0),
        amax_columnwise=torch.full((1,), 8.0),
        fp4_dtype=tex.DType.kFloat4E2M1,
        quantizer=None,
        with_gemm_swizzled_scales=False,
        device=data.device,
    )


@pytest.fixture(autouse=True)
def cpu_as_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of TransformerEngine's classes ask for it when they are copied, although they have been given one."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))


def _hybrid(data: torch.Tensor) -> torch.Tensor:
    te, tex = _of_te("hybrid")
    rows, columns = (_of_te("mxfp8")[0].MXFP8Quantizer(fp8_dtype=tex.DType.kFloat8E4M3) for _ in range(2))
    return te.HybridQuantizedTensor(
        shape=data.shape,
        dtype=torch.float32,
        rowwise_storage=_mxfp8(data),
        columnwise_storage=_mxfp8(data + 1),
        quantizer=te.HybridQuantizer(rowwise_quantizer=rows, columnwise_quantizer=columns),
        device=data.device,
    )


def _identity(data: torch.Tensor) -> torch.Tensor:
    te, _ = _of_te("identity")
    return te.IdentityTensor(data.shape, torch.float32, hp_data=data.float(), device=data.device)


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
    assert stats.copied_out_bytes == parts_bytes + output_bytes
    assert stats.num_storages_left == 0


@CLASSES
def test_a_marked_tensor_stays(make: Any) -> None:
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0), AdversarialDevice())

    def marked(data: torch.Tensor) -> torch.Tensor:
        tensor: Any = make(data)
        tensor._TE_do_not_offload = True
        return tensor

    source, weight = torch.rand(2, *SHAPE).requires_grad_(), make(torch.ones(SHAPE, dtype=torch.uint8))
    with engine.iteration():
        _run(engine, source, weight, marked)
    assert engine.stats.copied_out_bytes == 4 * source.numel(), "only what the next group saved"
    engine.close()


def test_a_part_modified_after_the_save_is_an_error() -> None:
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0, dry_run=True), AdversarialDevice())
    source, kept = torch.rand(2, *SHAPE).requires_grad_(), []

    def make(data: torch.Tensor) -> torch.Tensor:
        kept.append(data)
        return _quantized(data)

    with engine.iteration():
        chunk = engine.start_chunk()
        with chunk.saved_tensors_hooks():
            chunk.open_group("linear")
            output = _Multiply.apply(_Quantize.apply(source, make), _quantized(torch.ones(SHAPE)), [])
            chunk.close_group()
        kept[0].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()
        del output, chunk
    engine.close()


def test_a_class_that_is_not_known_is_refused_by_name_and_stays() -> None:
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0), AdversarialDevice())
    source, weight = torch.rand(2, *SHAPE).requires_grad_(), _quantized(torch.ones(SHAPE, dtype=torch.uint8))
    with engine.iteration(), pytest.warns(UserWarning, match="class Quantized stay on the device: what they hold is"):
        _run(engine, source, weight, lambda data: Quantized(data, torch.full((8,), 0.5)))
    assert engine.stats.copied_out_bytes == 4 * source.numel(), "only what the next group saved"
    engine.close()


def test_a_class_that_cannot_be_taken_apart_is_refused_by_name_and_stays() -> None:
    """As a `HybridQuantizedTensor` of storages that are no tensors: it cannot be detached."""

    class NVFP4Tensor(Quantized):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise NotImplementedError(func)

    engine, data = OffloadEngine(OffloadConfig(min_tensor_bytes=0), AdversarialDevice()), torch.ones(2, *SHAPE)
    tensor = NVFP4Tensor(data, data)
    with engine.iteration():
        chunk = engine.start_chunk()
        chunk.open_group("linear")
        with pytest.warns(UserWarning, match="class NVFP4Tensor stay on the device"):
            assert chunk.hooks.pack(tensor).unpack() is tensor and tensor._data is data
        chunk.close_group()
    engine.close()


def test_a_group_of_tensors_which_may_be_weights_stays() -> None:
    te, _ = _of_te("grouped")
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0), AdversarialDevice())
    data, seen = torch.ones(512, dtype=torch.uint8), list[Any]()
    experts = te.GroupedTensor((16, 32), torch.float32, num_tensors=2, shapes=[(8, 32)] * 2, data=data)
    with engine.iteration(), pytest.warns(UserWarning, match="class GroupedTensor stay on the device"):
        chunk = engine.start_chunk()
        chunk.open_group("experts")
        with chunk.saved_tensors_hooks():
            seen.append(chunk.hooks.pack(experts))
        chunk.close_group()
    assert engine.stats.copied_out_bytes == 0 and experts.rowwise_data is data
    seen.clear()
    engine.close()


class Linear(nn.Module):
    """Quantizes its input and saves it whole, as a layer in FP8 does with the output of another."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make
        self.weight = make(torch.full((1, 32), 3, dtype=torch.uint8))
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Multiply.apply(_Quantize.apply(x, self.make), self.weight, self.seen) / 100


CONFIG = OffloadConfig(min_tensor_bytes=0, directory="none")
FRONT_ENDS: dict[str, Callable[[nn.Sequential], Any]] = {
    "layers": lambda model: enable_activation_offloading(model, layers=list(model), config=CONFIG),
    "any model": lambda model: manage_activations(model, group_bytes=1024, config=CONFIG),
}


@CLASSES
@pytest.mark.parametrize("name", FRONT_ENDS)
def test_front_ends_take_them_apart_too(make: Any, name: str) -> None:
    model = nn.Sequential(*(Linear(make) for _ in range(6)))
    source = torch.rand((2, 8, 32), generator=torch.Generator().manual_seed(1)).requires_grad_()
    expected = torch.autograd.grad(model(source).sum(), source)[0]
    plain = [layer.seen.copy() for layer in model]
    handle = FRONT_ENDS[name](model)
    for layer in model:
        layer.seen.clear()
    with handle if name == "any model" else nullcontext():
        output = model(source)
    assert torch.equal(torch.autograd.grad(output.sum(), source)[0], expected)
    for layer, (kind, weight, parts) in zip(model, plain, strict=True):
        assert layer.seen[0] is kind and layer.seen[1] is weight is layer.weight
        assert all(map(torch.equal, layer.seen[2], parts)) and len(layer.seen[2]) == len(parts)
    own_bytes = sum(part.nbytes for part in plain[0][2])
    assert handle.stats.copied_out_bytes >= 2 * own_bytes, "those of some layers stay: their backward is next"
    assert handle.stats.num_storages_left == 0
    handle.close() if name == "any model" else handle.remove()


@CLASSES
def test_inputs_of_checkpoints_are_taken_apart(make: Any) -> None:
    """One of them quantized outside, as by the module in front."""
    seen: list[Any] = []
    weight = make(torch.ones((1, 32), dtype=torch.uint8))
    source = torch.rand((2, 8, 32), generator=torch.Generator().manual_seed(1)).requires_grad_()

    def run(checkpoint: Any) -> torch.Tensor:
        x = source
        for _ in range(4):
            x = checkpoint(lambda a: _Multiply.apply(a, weight, seen), _Quantize.apply(x, make), use_reentrant=False)
        return torch.autograd.grad(x.sum(), source)[0]

    expected = run(torch_checkpoint)
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0), AdversarialDevice())
    offload = CheckpointOffload(engine=engine)
    assert torch.equal(run(offload.checkpoint), expected)
    half = len(seen) // 2
    for plain, moved in zip(seen[2:half:3], seen[half + 2 :: 3], strict=True):
        assert all(map(torch.equal, plain, moved)) and len(plain) == len(moved)
    assert engine.stats.copied_out_bytes >= sum(part.nbytes for part in seen[2])
    offload.close()
