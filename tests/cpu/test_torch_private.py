# SPDX-License-Identifier: Apache-2.0
"""The private names of torch: each means what the packages take it to mean, and no other file uses one."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offload_engine._compat import torch_private
from tests.lookups import present

ROOT = Path(__file__).parents[2]
OWNER = "offload_engine/_compat/torch_private.py"
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


def num_users(tensor: torch.Tensor) -> int:
    return torch_private.use_count(tensor.untyped_storage()._cdata)


def test_the_use_count_counts_tensors_and_the_storage_in_hand() -> None:
    first = torch.zeros(4)
    assert num_users(first) == 2, "the tensor, and the storage that was asked for"
    second = first.detach()
    view, same, storage = second[1:], second, first.untyped_storage()
    assert torch_private.use_count(storage._cdata) == 4, "a view is a tensor more, whatever its base, and a name none"
    del second, view, same, storage
    assert num_users(first) == 2


def test_nodes_are_known_by_their_class() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    assert type(x.to(torch.double).grad_fn) is torch_private.CAST_NODE
    assert type(present(x.sin().grad_fn).next_functions[0][0]) is torch_private.LEAF_NODE
    views = [x.t(), x.transpose(0, 1), x.permute(1, 0), x.view(3, 2), x[0], x[:, 1:], x.as_strided((2,), (1,))]
    views += [x.split(1)[0], x.split([1, 2], dim=1)[0]]
    assert {type(view.grad_fn) for view in views} == torch_private.VIEW_NODES
    assert not {torch_private.LEAF_NODE, torch_private.CAST_NODE, type(x.sin().grad_fn)} & torch_private.VIEW_NODES


def test_the_package_does_not_import_without_a_name() -> None:
    program = "import torch\ndel torch._C._autograd._push_saved_tensors_default_hooks\nimport offload_engine"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    needs = "needs torch._C._autograd._push_saved_tensors_default_hooks (torch 2.11 to 2.15)"
    assert done.stderr.strip().splitlines()[-1].startswith(f"ImportError: offload_engine {needs}"), done.stderr
    assert done.stderr.count("Error: ") == 1, "one error, not a chain of them"
    with pytest.raises(ImportError, match=r"needs torch\.Tensor\._gone \(torch 2\.11 to 2\.15\); torch .* has none"):
        torch_private.check_attributes(torch.Tensor, "torch.Tensor", ("_version", "_gone"))
    with pytest.raises(ImportError, match=r"needs object\._stages \("):
        torch_private.of_schedule(object(), "_stages")


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


def test_no_other_file_takes_a_private_name_of_torch() -> None:
    paths = [path for package in ("offload_engine", "megatron_patches") for path in (ROOT / package).rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix(): private_names_of_torch(ast.parse(path.read_text())) for path in paths}
    assert {name: names for name, names in found.items() if names and name != OWNER} == STILL_ON_THEIR_OWN
