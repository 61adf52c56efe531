# SPDX-License-Identifier: Apache-2.0
"""What is read of tensors: by the extension module the same as in Python, for tensors of every kind."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

from offload_engine._compat import tensor_reads
from tests.cpu.test_cuda_calls import SOURCE, compile_library, pytestmark  # noqa: F401  (it skips without a compiler)
from tests.lookups import present

CPU = torch.device("cpu")


def discarded() -> torch.Tensor:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)
    return tensor


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.ones(2, 3),
    "scalar": lambda: torch.tensor(1.0),
    "empty": lambda: torch.empty(0, 3),
    "written": lambda: torch.zeros(4).add_(1).mul_(2),
    "discarded": discarded,
    "a part": lambda: torch.ones(4, 3)[1:],
    "a part from the front": lambda: torch.ones(4, 3)[:2],
    "transposed": lambda: torch.ones(2, 3).t(),
    "transposed column": lambda: torch.ones(3, 1).t(),
    "expanded": lambda: torch.ones(1, 3).expand(2, 3),
    "strided": lambda: torch.ones(8)[::2],
    "a bfloat16 view": lambda: torch.ones(8).view(torch.bfloat16),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negated": lambda: torch._neg_view(torch.ones(3)),
    "imaginary part of a conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "view of a parameter": lambda: torch.nn.Parameter(torch.ones(3))[1:],
    "view of a leaf": lambda: torch.ones(3, requires_grad=True)[1:],
    "detached view of a parameter": lambda: torch.nn.Parameter(torch.ones(3))[1:].detach(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "on another device": lambda: torch.ones(3, device="meta"),
    "tangent of zeros": lambda: torch._efficientzerotensor(4),
}


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the extension module, built from the source of this checkout, whatever is installed."""
    source = SOURCE.parents[1] / "_compat" / "_tensor_reads.c"
    path = compile_library(source, tmp_path_factory.mktemp("built") / "_tensor_reads.so")
    loader = importlib.machinery.ExtensionFileLoader("_tensor_reads", str(path))
    module = importlib.util.module_from_spec(present(importlib.util.spec_from_loader("_tensor_reads", loader)))
    loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", KINDS)
def test_both_read_the_same(kind: str, extension: Any) -> None:
    tensor = KINDS[kind]()
    for min_bytes in (1, 12, 13):
        expected, found = (each.read_plain(tensor, CPU, min_bytes) for each in (tensor_reads, extension))
        assert found == expected
        if expected is not None:
            assert found[0] is expected[0] and [type(value) for value in found] == [type(value) for value in expected]


def test_what_is_read(extension: Any) -> None:
    tensor = torch.ones(4, 3).add_(1)
    for module in (tensor_reads, extension):
        storage, key, nbytes, address, version, place, has_all, is_lazy = module.read_plain(tensor[1:], CPU, 1)
        assert (storage.data_ptr(), key, nbytes) == (tensor.data_ptr(), tensor.untyped_storage()._cdata, 48)
        assert (address, version, place) == (tensor.data_ptr(), 1, (3, (3, 3), (3, 1), torch.float32))
        assert (has_all, is_lazy) == (False, False)
        assert module.read_plain(tensor, CPU, 1)[6:] == (True, False)
        assert module.address_of(tensor.t()[2:], 48) == tensor.data_ptr()
        assert module.address_of(tensor, 47) is None


def test_both_see_writes_and_discarded_bytes(extension: Any) -> None:
    for module in (tensor_reads, extension):
        tensor = torch.ones(3)
        storage = tensor.untyped_storage()
        assert module.is_unmodified(tensor, 0, storage, 12) is True
        tensor.add_(1)
        assert module.is_unmodified(tensor, 0, storage, 12) is False
        assert module.is_unmodified(tensor, 1, storage, 12) is True
        storage.resize_(0)
        assert module.is_unmodified(tensor, 1, storage, 12) is False
