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
from tests.lookups import present

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


def test_cdata_is_the_address_of_the_storage_itself() -> None:
    first, other = torch.zeros(4), torch.zeros(4)
    key = first.untyped_storage()._cdata
    assert first.view(2, 2).untyped_storage()._cdata == first.detach().untyped_storage()._cdata == key
    assert other.untyped_storage()._cdata != key
    first.untyped_storage().resize_(1 << 20)
    assert first.untyped_storage()._cdata == key, "whatever its bytes are"
    assert key not in (first.data_ptr(), id(first))


def test_a_weak_reference_keeps_the_address_and_no_byte() -> None:
    tensor = torch.zeros(4)
    key = tensor.untyped_storage()._cdata
    weak = tensor.untyped_storage()._weak_ref()
    assert not torch.UntypedStorage._expired(weak)
    assert num_users(tensor) == 2, "it is no user"
    del tensor
    assert torch.UntypedStorage._expired(weak)
    others = [torch.zeros(4) for _ in range(200)]
    assert key not in [other.untyped_storage()._cdata for other in others]
    torch_private.free_weak_ref(weak)


def test_hooks_are_a_stack_of_this_thread() -> None:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    assert torch_private.innermost_hooks(True) is None
    torch_private.push_hooks(pack, unpack)
    try:
        assert torch_private.innermost_hooks(True) == (pack, unpack)
        with saved_tensors_hooks(unpack, pack):
            assert torch_private.innermost_hooks(True) == (unpack, pack)
        assert torch_private.innermost_hooks(True) == (pack, unpack)
        seen: list[object] = []
        thread = threading.Thread(target=lambda: seen.append(torch_private.innermost_hooks(True)))
        thread.start()
        thread.join()
        assert seen == [None]
    finally:
        torch_private.pop_hooks()
    assert torch_private.innermost_hooks(True) is None


def test_nodes_are_known_by_their_class() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    assert type(x.to(torch.double).grad_fn) is torch_private.CAST_NODE
    assert type(present(x.sin().grad_fn).next_functions[0][0]) is torch_private.LEAF_NODE
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


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


@pytest.mark.parametrize("make", [torch.sin, _Twice.apply], ids=["in C++", "in Python"])
def test_a_node_takes_over_a_dictionary_of_hooks(make: Any) -> None:
    x = torch.ones(4, requires_grad=True)
    y, seen = make(x), []
    assert y._backward_hooks is None
    y._backward_hooks = {0: lambda grad: seen.append(grad)}
    y.grad_fn._register_hook_dict(y)
    y._backward_hooks = None
    y.register_hook(lambda grad: seen.append("of another"))
    assert len(y._backward_hooks) == 1
    y.backward(torch.full((4,), 3.0))
    assert len(seen) == 2 and torch.equal(seen[0], torch.full((4,), 3.0)) and seen[1] == "of another"


def test_the_compiler_is_seen_where_it_runs() -> None:
    assert torch_private.eval_frame_callback() is None
    seen: list[Any] = []

    @torch.compile(backend=lambda graph, _: graph)
    def function(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        note()
        return x * 2

    note = torch.compiler.disable(lambda: seen.append(torch_private.eval_frame_callback()), recursive=False)

    function(torch.ones(2))
    assert callable(seen[0]) and not callable(torch_private.eval_frame_callback())


def test_cuda_names_are_functions_everywhere() -> None:
    """A build without CUDA says what is missing when they are called, not at import."""
    if torch.version.cuda is None:
        with pytest.raises(ImportError, match=r"needs torch\._C\._cuda_getDevice \(torch 2\.11 to 2\.15\)"):
            torch_private.cuda_current_device()
        with pytest.raises(ImportError, match=r"needs torch\._C\._cuda_getCurrentRawStream"):
            torch_private.cuda_current_stream(0)
    elif torch.cuda.is_available():
        assert torch_private.cuda_current_device() == torch.cuda.current_device()
        assert torch_private.cuda_current_stream(0) == torch.cuda.current_stream(0).cuda_stream
        assert not torch_private.cuda_is_capturing()
    else:
        assert torch_private.cuda_current_device is torch._C._cuda_getDevice
        assert torch_private.cuda_current_stream is torch._C._cuda_getCurrentRawStream
        assert torch_private.cuda_is_capturing is torch._C._cuda_isCurrentStreamCapturing


# ---- a name that is missing ----


@pytest.mark.parametrize("path", ["torch._C._no_such_name", "torch._C._nowhere.name", "torch._gone"])
def test_a_missing_name_is_one_clear_error(path: str) -> None:
    with pytest.raises(ImportError) as caught:
        torch_private.take(path)
    assert str(caught.value) == (
        f"offload_engine needs {path} (torch 2.11 to 2.15); torch {torch.__version__} has none: install a torch "
        "between those two, or a later offload_engine that supports this one"
    )


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("torch._C", "_storage_Use_Count"),
        ("torch._C._autograd", "_push_saved_tensors_default_hooks"),
        ("torch.nn.modules.module", "_global_forward_hooks"),
    ],
)
def test_the_package_does_not_import_without_a_name(owner: str, name: str) -> None:
    program = f"import torch\ndel {owner}.{name}\nimport offload_engine"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: offload_engine needs {owner}.{name} (torch 2.11 to 2.15); torch "), (
        done.stderr
    )
    assert done.stderr.count("Error: ") == 1, "one error, not a chain of them"


def test_a_missing_attribute_is_the_same_error() -> None:
    with pytest.raises(ImportError, match=r"needs torch\.Tensor\._gone \(torch 2\.11 to 2\.15\); torch .* has none"):
        torch_private.check_attributes(torch.Tensor, "torch.Tensor", ("_version", "_gone"))
    with pytest.raises(ImportError, match=r"needs object\._stages \("):
        torch_private.of_schedule(object(), "_stages")


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


def foreign_attributes(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Private attributes of something else than `self`, and what they are read of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls") and owner.split(".")[0] != "torch":
                yield node.attr, owner


def own_names() -> set[str]:
    """List private attributes that the packages themselves define, and those of named tuples."""
    found = {"_replace", "_asdict", "_fields", "_make"}
    for _, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return found


def test_no_other_file_takes_a_private_name_of_torch() -> None:
    found = {name: private_names_of_torch(tree) for name, tree in sources()}
    assert {name: names for name, names in found.items() if names} == STILL_ON_THEIR_OWN


def test_private_attributes_of_others_are_listed() -> None:
    known = ATTRIBUTES | own_names()
    wrong = {
        (name, f"{owner}.{attribute}")
        for name, tree in sources()
        for attribute, owner in foreign_attributes(tree)
        if attribute not in known
    }
    assert wrong == {
        ("megatron_patches/_arguments.py", "argparse._ArgumentGroup"),
        ("offload_engine/_host/try_lock.py", "lock._is_owned"),
        # Who calls a callback.
        ("offload_engine/frontends/integrations/_reporters.py", "sys._getframe"),
        # The plan before the GPU: names of operators, and what each of them says of itself.
        ("offload_engine/rehearsal/attention.py", "aten._scaled_dot_product_efficient_attention"),
        ("offload_engine/rehearsal/attention.py", "aten._scaled_dot_product_flash_attention"),
        ("offload_engine/rehearsal/costs.py", "func._overloadpacket"),
        ("offload_engine/rehearsal/costs.py", "func._schema"),
        ("offload_engine/rehearsal/operators.py", "func._overloadpacket"),
        ("offload_engine/rehearsal/operators.py", "func._schema"),
        ("offload_engine/rehearsal/tensors.py", "c10d._create_work_from_future"),
    }
