# SPDX-License-Identifier: Apache-2.0
"""Tensors that hold quantized data: the data and its scales move, weights stay, and the same class comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from offload_engine import OffloadConfig, OffloadEngine, ResidencyMeter, group_commit
from tests.adversarial import AdversarialDevice

SHAPE = (16, 32)


class Quantized(torch.Tensor):
    """The least that TransformerEngine's quantized tensors have in common, in all its versions."""

    _data: torch.Tensor | None
    _scale: torch.Tensor | None

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Quantized:
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
            return Quantized(args[0]._data, args[0]._scale)
        raise NotImplementedError(func)


def _quantized(data: torch.Tensor) -> torch.Tensor:
    return Quantized(data, torch.full((8,), 0.5))


def _float8(data: torch.Tensor) -> torch.Tensor:
    te = pytest.importorskip("transformer_engine.pytorch.tensor.float8_tensor", exc_type=Exception)  # type: ignore[call-overload]
    tex = pytest.importorskip("transformer_engine_torch")
    return te.Float8Tensor(
        shape=data.shape,
        dtype=torch.float32,
        data=data,
        fp8_scale_inv=torch.full((1,), 0.5),
        fp8_dtype=tex.DType.kFloat8E4M3,
        device=data.device,
    )


def _blockwise(data: torch.Tensor) -> torch.Tensor:
    module = "transformer_engine.pytorch.tensor.float8_blockwise_tensor"
    te = pytest.importorskip(module, exc_type=Exception)  # type: ignore[call-overload]
    tex = pytest.importorskip("transformer_engine_torch")
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


CLASSES = pytest.mark.parametrize("make", [_quantized, _float8, _blockwise])


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
    """Saves two quantized tensors whole, and notes what comes back."""

    @staticmethod
    def forward(ctx: Any, activation: Any, weight: Any, seen: list[Any]) -> torch.Tensor:
        ctx.save_for_backward(activation, weight)
        ctx.seen = seen
        return _parts(activation)[0].float()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        activation, weight = ctx.saved_tensors
        ctx.seen += [type(activation), weight]
        data, scale = _parts(activation)
        return grads[0] * data.float() * scale.flatten()[0] * _parts(weight)[0].float(), None, None


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
    for kind, same, grad in (moved[0:3], moved[3:6]):
        assert kind is type(weight) and same is weight
        assert torch.equal(grad, plain[2])
    parts_bytes = source.numel() + _parts(weight)[-1].nbytes if len(shape) > 2 else 0
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
