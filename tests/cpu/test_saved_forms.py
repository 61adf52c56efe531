# SPDX-License-Identifier: Apache-2.0
"""A saved tensor comes back in the form it had: shape, stride, offset, dtype, and what is lazy about it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from offload_engine import OffloadConfig, OffloadEngine
from tests.adversarial import AdversarialDevice
from tests.engine_state import release_all

FORMS: dict[str, Callable[[], torch.Tensor]] = {
    "whole": lambda: torch.randn(4, 3, 2),
    "number": lambda: torch.tensor(7.0),
    "bytes": lambda: torch.arange(100, dtype=torch.uint8),
    "dimensions of one, with strides of their own": lambda: torch.randn(6).as_strided((6, 1, 1), (1, 17, 5)),
    "transposed": lambda: torch.randn(4, 5).t(),
    "part": lambda: torch.randn(10)[2:7],
    "front": lambda: torch.randn(10)[:5],
    "expanded": lambda: torch.randn(1, 5).expand(4, 5),
    "reinterpreted": lambda: torch.randn(8).view(torch.int32),
    "conjugate": lambda: torch.randn(3, 2, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
}


def form_of(tensor: torch.Tensor) -> tuple[object, ...]:
    bits = (tensor.is_conj(), tensor.is_neg(), tensor.requires_grad)
    return (*bits, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())


@pytest.fixture(params=["on host", "resident"])
def is_on_host(request: pytest.FixtureRequest) -> bool:
    return request.param == "on host"


def check_restored(tensors: list[torch.Tensor], is_on_host: bool) -> None:
    """Save views of one storage in one group, move the group out and in, and unpack each of them twice."""
    expected = [(form_of(tensor), tensor.clone()) for tensor in tensors]
    device = AdversarialDevice()
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0), device)
    with engine.iteration():
        chunk = engine.start_chunk()
        group = chunk.open_group("group")
        handles = [chunk.tensor_push(tensor) for tensor in tensors]
        tensors.clear()
        chunk.close_group()
        if is_on_host:
            release_all(engine)
        chunk.on_group_commit_backward(group)
        for _ in range(2):
            restored = [chunk.tensor_pop(handle) for handle in handles]
            assert [form_of(tensor) for tensor in restored] == [form for form, _ in expected]
            assert all(torch.equal(tensor, values) for tensor, (_, values) in zip(restored, expected, strict=True))
            for tensor in filter(torch.Tensor.is_contiguous, restored):
                tensor += 0  # what the backward writes in place is no modification of what was saved
        assert (engine.stats.copied_in_bytes > 0) == is_on_host
        del handles, restored
    engine.close()
    assert not device.hazards


@pytest.mark.parametrize("form", FORMS)
def test_one_tensor(form: str, is_on_host: bool) -> None:
    check_restored([FORMS[form]()], is_on_host)


@pytest.mark.parametrize("first", ["as it is", "transposed", "as integers", "a part"])
def test_several_tensors_over_one_storage(first: str, is_on_host: bool) -> None:
    """Only one of them is the storage as it is, and that one need not be the first."""
    base = torch.randn(6, 4)
    views = {"as it is": base, "transposed": base.t(), "as integers": base.view(torch.int32), "a part": base[1:3]}
    del base
    saved = [views.pop(first), *views.values()]
    views.clear()
    check_restored(saved, is_on_host)


def test_held_in_another_form() -> None:
    """The holder of the bytes may hold a view; the saved tensor is not that view."""
    device = AdversarialDevice()
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0), device)
    saved = torch.randn(4, 6)
    values, other = saved.clone(), saved.detach()
    with engine.iteration():
        chunk = engine.start_chunk()
        group = chunk.open_group("group")
        handle = chunk.tensor_push(saved)
        chunk.close_group()
        release_all(engine)
        engine.held_elsewhere(saved.view(24))  # `other` is not told of, so the storage stays
        assert engine.stats.num_viewed_storages == 1
        chunk.on_group_commit_backward(group)
        restored = chunk.tensor_pop(handle)
        assert restored.shape == (4, 6) and torch.equal(restored, values)
        del handle, other
    engine.close()


def test_bytes_discarded_in_place_are_not_copied_and_not_returned() -> None:
    """`resize_` leaves no trace in the version counter."""
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0), AdversarialDevice())
    engine.begin_iteration()
    chunk = engine.start_chunk()
    chunk.open_group("group")
    tensor = torch.ones(4)
    handle = chunk.tensor_push(tensor)
    tensor.untyped_storage().resize_(0)
    chunk.close_group()
    assert engine.stats.copied_out_bytes == 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        chunk.tensor_pop(handle)
    del handle
    engine.end_iteration()
    engine.close()
