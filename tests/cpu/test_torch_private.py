# SPDX-License-Identifier: Apache-2.0
"""The private names of torch: each means what the packages take it to mean, and no other file uses one."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from offload_engine._compat import torch_private

ROOT = Path(__file__).parents[2]
PACKAGES = ("offload_engine", "megatron_patches")
OWNER = "offload_engine/_compat/torch_private.py"
ATTRIBUTES = {
    *torch_private.TENSOR_ATTRIBUTES,
    *torch_private.STORAGE_ATTRIBUTES,
    *torch_private.NODE_ATTRIBUTES,
    *torch_private.MODULE_ATTRIBUTES,
    *torch_private.PROFILER_ATTRIBUTES,
}
STILL_ON_THEIR_OWN: dict[str, set[str]] = {  # the plan before the GPU, in which nothing trains
    "megatron_patches/_rehearsal/building.py": {"torch.testing._internal.distributed.fake_pg.FakeStore"},
    "megatron_patches/_rehearsal/kernels.py": {
        "torch.ops.aten._scaled_dot_product_flash_attention",
        "torch.ops.aten._scaled_dot_product_flash_attention_backward",
    },
    "offload_engine/rehearsal/tensors.py": {
        "torch._C._distributed_c10d",
        "torch.utils._python_dispatch.TorchDispatchMode",
    },
}


# ---- what they mean ----


def num_users(tensor: torch.Tensor) -> int:
    return torch_private.use_count(tensor.untyped_storage()._cdata)


def test_the_use_count_counts_tensors_and_the_storage_in_hand() -> None:
    first = torch.zeros(4)
    assert num_users(first) == 2, "the tensor, and the storage that was asked for"
    second = first.detach()
    assert num_users(first) == 3
    view = second[1:]
    assert num_users(first) == 4, "a view is a tensor more, whatever its base is"
    same = second
    assert num_users(same) == 4, "a name is none"
    storage = first.untyped_storage()
    assert torch_private.use_count(storage._cdata) == 4, "the storage in hand, once, and three tensors"
    del second, view, same, storage
    assert num_users(first) == 2


def test_the_use_count_counts_what_a_graph_saved() -> None:
    x = torch.ones(4, requires_grad=True)
    middle = x * 2
    y = middle.sin()  # saves its input: the same tensor object
    assert num_users(middle) == 2
    z = middle.exp()  # saves its result: an alias, or else a cycle
    assert num_users(middle) == 2 and num_users(z) == 3
    alias = middle.detach()
    del middle
    assert num_users(alias) == 3, "the graph has it still"
    del y
    assert num_users(alias) == 2, "and has let go of it"


def test_hooks_are_a_stack_of_this_thread() -> None:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tuple(tensor.shape))
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    packed: list[Any] = []
    seen: list[object] = []
    assert torch_private.innermost_hooks(True) is None
    torch_private.push_hooks(pack, unpack)
    try:
        with saved_tensors_hooks(unpack, unpack):
            assert torch_private.innermost_hooks(True) == (unpack, unpack)
        assert torch_private.innermost_hooks(True) == (pack, unpack)
        thread = threading.Thread(target=lambda: seen.append(torch_private.innermost_hooks(True)))
        thread.start()
        thread.join()
        torch.ones(3, requires_grad=True).sin()
    finally:
        torch_private.pop_hooks()
    assert torch_private.innermost_hooks(True) is None
    torch.ones(5, requires_grad=True).sin()
    assert seen == [None] and packed == [(3,)]


def test_attributes_of_tensors_and_storages() -> None:
    x = torch.ones(4)
    storage, view, before = x.untyped_storage(), x[1:], x._version
    assert view._is_view() and view._base is x and not x._is_view() and x._base is None
    view.add_(1)
    assert x._version == view._version == before + 1 and x.detach()._version == x._version and x.data._version == 0
    assert not x._is_zerotensor() and torch._efficientzerotensor(3)._is_zerotensor()
    assert torch.equal(torch_private.neg_view(x), -x) and torch_private.neg_view(x).is_neg()
    key, weak = storage._cdata, storage._weak_ref()
    storage.resize_(1 << 20)
    assert view.detach().untyped_storage()._cdata == key, "whatever its bytes are"
    del x, view, storage
    assert torch.UntypedStorage._expired(weak), "a weak reference keeps no byte"
    others = [torch.zeros(4) for _ in range(200)]
    assert key not in [other.untyped_storage()._cdata for other in others], "and keeps the address"
    torch_private.free_weak_ref(weak)


def test_nodes_and_backwards_have_numbers() -> None:
    x = torch.ones(2, requires_grad=True)
    number, seen = torch_private.next_sequence_nr(), [torch_private.current_graph_task()]
    middle = x.sin()
    assert middle.grad_fn is not None and middle.grad_fn._sequence_nr() == number < torch_private.next_sequence_nr()
    middle._backward_hooks = {0: lambda _: seen.append(torch_private.current_graph_task())}
    middle.grad_fn._register_hook_dict(middle)  # it runs them
    middle._backward_hooks = None
    x.register_hook(lambda _: seen.append(torch_private.current_graph_task()))
    for _ in range(2):
        middle.sum().backward(retain_graph=True)
    assert seen[0] == -1 == torch_private.current_graph_task()
    assert -1 not in seen[1:] and seen[1] == seen[2] != seen[3] == seen[4]


def test_a_callback_runs_when_its_backward_is_over() -> None:
    order: list[str] = []
    x = torch.ones(2, requires_grad=True)
    middle = x.sin()
    middle.register_hook(lambda _: torch_private.queue_callback(lambda: order.append("callback")))
    x.register_post_accumulate_grad_hook(lambda _: order.append("gradient"))
    middle.sum().backward()
    order.append("back")
    assert order == ["gradient", "callback", "back"]
    with pytest.raises(RuntimeError):
        torch_private.queue_callback(lambda: None)


def test_nodes_are_known_by_their_class() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    assert type(x.to(torch.double).grad_fn) is torch_private.CAST_NODE
    assert type(x.sin().grad_fn.next_functions[0][0]) is torch_private.LEAF_NODE
    views = [
        x.t(),
        x.transpose(0, 1),
        x.permute(1, 0),
        x.view(3, 2),
        x[0],
        x[:, 1:],
        x.split(1)[0],
        x.split([1, 2], dim=1)[0],
        x.as_strided((2,), (1,)),
    ]
    assert {type(view.grad_fn) for view in views} == torch_private.VIEW_NODES
    assert not {torch_private.LEAF_NODE, torch_private.CAST_NODE, type(x.sin().grad_fn)} & torch_private.VIEW_NODES


# ---- a name that is missing ----


def test_the_package_does_not_import_without_a_name() -> None:
    """One clear error, not a chain of them."""
    program = "import torch\ndel torch._C._storage_Use_Count\nimport offload_engine"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.count("Error: ") == 1 and done.stderr.strip().splitlines()[-1] == (
        f"ImportError: offload_engine needs torch._C._storage_Use_Count (torch 2.6 to 2.15); torch {torch.__version__} "
        "has none: install a torch between those two, or a later offload_engine that knows this one"
    )


def test_a_missing_attribute_is_the_same_error_and_a_function_of_some_builds_raises_when_it_is_called() -> None:
    with pytest.raises(ImportError, match=r"needs torch\.Tensor\._gone \(torch 2\.6 to 2\.15\); torch .* has none"):
        torch_private.check_attributes(torch.Tensor, "torch.Tensor", ("_version", "_gone"))
    with pytest.raises(ImportError, match=r"needs object\._stages \("):
        torch_private.of_schedule(object(), "_stages")
    of_cuda = torch_private.take_or_refuse("torch._C._of_cuda")
    with pytest.raises(ImportError, match=r"needs torch\._C\._of_cuda"):
        of_cuda(0)


# ---- no other file uses one ----


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name != OWNER:
                yield name, ast.parse(path.read_text())


def private_names_of_torch(tree: ast.Module) -> set[str]:
    """List dotted names below `torch` with a private part, as far as they are written; imports of such too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts = ast.unparse(node).split(".")
            if parts[0] == "torch" and parts[-1].startswith("_"):
                found.add(".".join(parts))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found.update(f"{node.module}.{alias.name}" for alias in node.names if "._" in f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            found.update(a.name for a in node.names if a.name.startswith("torch.") and "._" in a.name)
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


def attributes_of_others(tree: ast.Module) -> set[str]:
    """List private attributes of something else than `self`."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.endswith("__")
        and ast.unparse(node.value) not in ("self", "cls")
    }


def test_no_other_file_takes_a_private_name_of_torch() -> None:
    found = {name: private_names_of_torch(tree) for name, tree in sources()}
    assert {name: names for name, names in found.items() if names} == STILL_ON_THEIR_OWN


def test_private_attributes_of_objects_of_torch_are_listed() -> None:
    tensor = torch.ones(1, requires_grad=True)
    objects = (tensor, tensor.untyped_storage(), tensor.sin().grad_fn, torch.nn.Linear(1, 1))
    taken = {(name, attribute) for name, tree in sources() for attribute in attributes_of_others(tree)}
    of_torch = {each for each in taken if any(hasattr(of, each[1]) for of in objects)}
    assert {attribute for _, attribute in of_torch} <= ATTRIBUTES and len(of_torch) > 10
