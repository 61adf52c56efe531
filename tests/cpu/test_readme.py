"""What the documentation says is true: its code runs, its tables agree with the source, what it names exists."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import keyword
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import get_args

import pytest
import torch

from megatron_patches import add_offload_arguments, known_names
from megatron_patches._arguments import Settings, config_rows
from megatron_patches._handle import patch_rows
from megatron_patches._model.modules import MODULES, ModuleRow
from megatron_patches._runtime import ModelRuntime
from megatron_patches._versions import SUPPORTED
from offload_engine import OffloadConfig
from offload_engine.planning.moves import BoundaryKind, Op, parse_boundary
from offload_engine.policies import PolicySettings

ROOT = Path(__file__).parents[2]
README, ARCHITECTURE, PLAN = ROOT / "README.md", ROOT / "docs" / "architecture.md", ROOT / "docs" / "plan.md"
MIGRATION = ROOT / "docs" / "migration.md"
PAGES = sorted((ROOT / "docs" / "frontends").glob("*.md"))
DOCUMENTS = [
    README,
    ARCHITECTURE,
    PLAN,
    ROOT / "docs" / "budget.md",
    ROOT / "docs" / "observe.md",
    MIGRATION,
    *PAGES,
]
PACKAGES = ("offload_engine", "megatron_patches")

# Names in the documentation that are not ours.
FOREIGN = {
    "Accelerator.prepare", "ModuleList", "Trainer", "Trainer.fit", "TrainingArguments", "apex",
    "apply_activation_checkpointing",
    "checkpoint_wrapper", "context_fn", "debug", "determinism_check", "device_type", "early_stop", "fully_shard",
    "generate", "gradient_checkpointing_enable", "gradient_checkpointing_kwargs", "megatron.core",
    "MLATransformerConfig", "nn.Module", "no_grad", "none", "preserve_rng_state", "record_stream", "save_on_cpu",
    "act", "emit_nvtx", "fc1", "jacrev", "torch.func.grad", "torch.profiler", "vjp", "vmap",
    "str", "torch", "torch.cuda", "torch.distributed.pipelining", "torch.compile", "torch.utils.checkpoint.checkpoint",
    "TransformerConfig",
    # TransformerEngine
    "AsyncDoubleBufferGroupOffloadHandler", "manual_synchronization", "model_layers", "num_layers", "offload_stream",
    "retain_pinned_cpu_buffers",
    "cpu_offloading_num_layers", "cpu_offloading_weights", "cpu_offloading_double_buffering",
    "cpu_offloading_retain_pinned_cpu_buffers",
    # SMP
    "offload_activations", "sm_activation_offloading",
    # megatron-core
    "NVTE_CPU_OFFLOAD_V1", "activation_offload_fraction", "cuda_graph_impl", "delay_offload_until_cuda_graph",
    "delta_offload_bytes_across_pp_ranks", "fine_grained_activation_offloading",
    "fine_grained_offloading_max_inflight_offloads", "min_offloaded_tensor_size", "use_transformer_engine_op_fuser",
}  # fmt: skip

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"(?:\w[\w.-]*/)+[\w.-]*|\w+\.(?:py|md|sh)")


def name_of(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


def prose(document: Path) -> str:
    """Return the text without its code blocks."""
    return FENCE.sub("", document.read_text())


def blocks(document: Path, language: str) -> list[str]:
    """Return the code blocks in `language`: "python" is run, "py" is code for other libraries and only parsed."""
    return [code for found, code in FENCE.findall(document.read_text()) if found == language]


def python_blocks() -> Iterator[str]:
    """Return whole programs."""
    for document in DOCUMENTS:
        if document != MIGRATION:
            yield from blocks(document, "python")


def section(document: Path, heading: str) -> str:
    """Return the text under a heading, up to the next one of any level."""
    found = re.search(rf"^#+ {heading}\n(.*?)(?=^#|\Z)", prose(document), re.MULTILINE | re.DOTALL)
    assert found, f"{document.name} has no heading {heading!r}"
    return found[1]


def table(text: str) -> list[list[str]]:
    """Return the cells of the rows of the tables in `text`, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    heads = {i - 1 for i, line in enumerate(lines) if line.startswith("|---")}
    rows = [line for i, line in enumerate(lines) if i not in heads and not line.startswith("|---")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def run_python(*arguments: str, cwd: Path) -> str:
    """Run Python in a process of its own, with the packages of this checkout; return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


# ---- code ----


@pytest.mark.parametrize("block", list(python_blocks()), ids=lambda code: code.split("\n", 1)[0])
def test_python_block_runs(block: str, tmp_path: Path) -> None:
    if "megatron" in block:
        pytest.importorskip("megatron.core")
        assert "None" in run_python("-c", block, cwd=tmp_path)
    else:
        if "transformers" in block:
            pytest.importorskip("transformers")
            pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")
        if "print(" in block:
            assert_it_offloads(block, tmp_path)
        else:
            run_python("-c", block, cwd=tmp_path)  # it attaches, and leaves the steps to the reader


def assert_it_offloads(code: str, directory: Path) -> None:
    assert re.search(r"copied_out_bytes=[1-9]", run_python("-c", code, cwd=directory))


# What the blocks of the migration page find: a model whose layers save tensors of 2 MiB.
AROUND_MIGRATION = """
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        make = lambda: torch.nn.TransformerEncoderLayer(128, 4, dropout=0.0, batch_first=True)
        self.layers = torch.nn.ModuleList(make() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

def is_layer(module):
    return isinstance(module, torch.nn.TransformerEncoderLayer)

def shard(model):
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for layer in (*model.layers, model):
        torch.distributed.fsdp.fully_shard(layer, mesh=mesh)

model, batch = Model(), torch.randn(64, 64, 128)
"""


@pytest.mark.parametrize("block", blocks(MIGRATION, "python"), ids=lambda code: code.split("\n", 1)[0])
def test_code_after_migration_runs(block: str, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("the blocks of docs/migration.md are tried on the CPU: run this test where there is no GPU")
    shard = "import torch.distributed.fsdp\nshard(model)\n" if '"fsdp2"' in block else ""
    assert_it_offloads(AROUND_MIGRATION + shard + block, tmp_path)


def test_code_for_other_libraries_is_code() -> None:
    found = [(document, block) for document in DOCUMENTS for block in blocks(document, "py")]
    assert len(found) > 3
    for document, block in found:
        compile(block, str(document), "exec")


def test_each_front_end_has_its_page() -> None:
    front_ends = ("enable_activation_offloading", "manage_activations", "offload_wrapper", "checkpoint", "integrations")
    assert {page.stem for page in PAGES} == {*front_ends, "README"}
    for page in PAGES:
        if page.stem != "README":
            assert headings(page) == [headings(page)[0], "When to choose it", "Example", "Knobs", "Limits"], page.name


def test_plain_pytorch_example(tmp_path: Path) -> None:
    printed = run_python(str(ROOT / "examples" / "plain_pytorch.py"), "2", cwd=tmp_path)
    assert "equal to the last bit: True" in printed
    peaks = re.findall(r"(\d+) MiB", printed)
    assert int(peaks[1]) < 0.5 * int(peaks[0])


# ---- tables ----


def module_cells(row: ModuleRow) -> list[str]:
    """Return the row of the README's table for a row of `MODULES`."""
    return [", ".join(f"`{name}`" for name in (row.name, *row.aliases)), row.saves]


def test_module_names() -> None:
    expected = [module_cells(row) for row in MODULES]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in expected)
    assert table(section(README, "Module names")) == expected, f"the table must read\n{text}"


def test_flags() -> None:
    parser = add_offload_arguments(argparse.ArgumentParser(add_help=False))
    expected = {}
    for action in parser._actions:
        stated = re.search(r"Default: (.*?)\.(?: |$)", action.help or "")
        expected[action.option_strings[0]] = stated[1] if stated else "off"
    rows = table(section(README, "Flags"))
    assert {flag.strip("`").split()[0]: default.strip("`") for flag, default, _ in rows} == expected


def test_patch_rows() -> None:
    rows = patch_rows(ModelRuntime(Settings(OffloadConfig(), ()), None))
    targets = {row.target.removeprefix("megatron.core.") for row in rows}
    patterns = [cells[0].strip("`") for cells in table(section(ARCHITECTURE, "How megatron_patches hooks in"))]
    for target in targets:
        assert any(fnmatchcase(target, pattern) for pattern in patterns), f"{target} is not in the table"
    for pattern in patterns:
        assert any(fnmatchcase(target, pattern) for target in targets), f"{pattern} matches no row"


def test_boundaries() -> None:
    stated = {kind.strip("`"): text.strip("`") for kind, text, *_ in table(section(PLAN, "Boundaries"))}
    assert {name: parse_boundary(text).kind.name for name, text in stated.items()} == {name: name for name in stated}
    assert set(stated) == set(BoundaryKind.__members__)


def test_moves() -> None:
    assert [op.strip("`") for op, _ in table(section(PLAN, "Moves"))] == list(Op.__members__)


def test_policies() -> None:
    stated = [cells[0].strip("`").split("(")[0] for cells in table(section(PLAN, "Policies"))]
    assert {policy.__name__ for policy in get_args(PolicySettings)} <= set(stated)


def test_rules_of_the_executor() -> None:
    source = (ROOT / "offload_engine/_policy/executor.py").read_text()
    rules = re.findall(r"^ {5}(\d)\. ", source, re.MULTILINE)
    assert rules and rules == re.findall(r"^(\d)\. ", section(PLAN, "What the executor guarantees"), re.MULTILINE)


def test_rules_of_order() -> None:
    stated = re.findall(r"^ (\d)\. (.+?)\. ", (ROOT / "offload_engine/_saved/transfers.py").read_text(), re.MULTILINE)
    assert stated == re.findall(r"^(\d)\. (.+?): ", section(README, "How it works"), re.MULTILINE)


def test_versions() -> None:
    cells = {row[0]: row[1:] for row in table(section(README, "What is supported")) if len(row) == 3}
    setup = (ROOT / "setup.py").read_text()
    pins = [dict(re.findall(r"^([\w-]+)==([\w.]+)$", path.read_text(), re.MULTILINE)) for path in constraints()]
    oldest, newest = re.findall(r"[\d.]+\d", SUPPORTED)
    assert newest == "0.20" and cells["megatron-core"][0] == f"{oldest} to 0.19.x"
    assert cells["torch"][0] == re.search(r"torch>=([\d.]+)", setup)[1] + " and later"  # type: ignore[index]
    te = re.search(r"transformer-engine\[pytorch\]>=([\d.]+)", setup)
    assert te and cells["TransformerEngine"][0] == f"{te[1]} and later, or none"
    for pin in pins:
        assert pin["torch"] in cells["torch"][1] and pin["megatron-core"] in cells["megatron-core"][1]
        assert pin.get("transformer_engine", "none") in cells["TransformerEngine"][1]


def constraints() -> list[Path]:
    return sorted(ROOT.glob("constraints-py3*.txt"))


# ---- names ----


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document: Path) -> None:
    for link in LINK.findall(prose(document)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{document.name} links to {link}, which does not exist"
        anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in headings(target)}
        assert not anchor or anchor in anchors, f"{document.name} links to {link}: no such heading"


def headings(document: Path) -> list[str]:
    return re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE) if document.suffix == ".md" else []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_names_in_the_documents_exist(document: Path) -> None:
    symbols, options = {*defined_symbols(), *known_names(), *settings(), *FOREIGN}, known_options()
    unknown = [span for span in SPAN.findall(prose(document)) if not is_known(span, symbols, options)]
    assert not unknown, f"{document.name} names what is not there: {unknown}"
    for path in (
        path for _, code in FENCE.findall(document.read_text()) for path in re.findall(r"\btools/[\w.]+", code)
    ):
        assert (ROOT / path).exists(), f"{document.name} calls {path}, which does not exist"


def is_known(span: str, symbols: set[str], options: set[str]) -> bool:
    """Tell whether the words of a code span are names, flags or files of this repository, or known from elsewhere."""
    words = span.split()
    if words[0] in ("python", "pip"):
        return words[0] == "pip" or all(is_file(word) for word in words if PATH.fullmatch(word))
    if variable := re.fullmatch(r"([A-Z_]+)=\w+", words[0]):  # of the environment, when the package is built
        return f'"{variable[1]}"' in (ROOT / "setup.py").read_text()
    word = words[0].removesuffix("()")
    if word.startswith("--"):
        return word in options
    if is_public(word) or is_file(word) or is_target(word) or is_boundary(word):
        return True
    return word in symbols or is_code(span, symbols)


def is_public(word: str) -> bool:
    package, _, name = word.partition(".")
    return package in PACKAGES and name in importlib.import_module(package).__all__


def is_code(span: str, symbols: set[str]) -> bool:
    """Tell whether it is Python of which every name is known, and every string is written somewhere in the packages."""
    if span in modules():
        return True
    strings = re.findall(r'"[^"]*"', span)
    names = re.findall(r"[A-Za-z_]\w*", re.sub(r'"[^"]*"', "", span))
    known = symbols | members() | set(keyword.kwlist)
    return all(name in known for name in names) and all(string in package_text() for string in strings)


@functools.cache
def members() -> frozenset[str]:
    """List functions, classes, attributes and parameters that the packages define, by their bare names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(package_text())):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return frozenset(found)


@functools.cache
def modules() -> frozenset[str]:
    """List dotted names of the packages' modules."""
    files = (path.relative_to(ROOT).with_suffix("") for path in python_files(*PACKAGES))
    return frozenset(".".join(path.parts) for path in files)


@functools.cache
def package_text() -> str:
    """Return the source of both packages; one `__future__` import, which must come first, stands for all."""
    first = "from __future__ import annotations\n"
    return first + "".join(path.read_text().replace(first, "") for path in python_files(*PACKAGES))


def is_file(word: str) -> bool:
    return PATH.fullmatch(word) is not None and (ROOT / word).exists()


def is_target(word: str) -> bool:
    return ":" in word  # of a patch: `test_patch_rows` looks at these


def is_boundary(word: str) -> bool:
    """Tell whether it is the text of a boundary; `test_boundaries` looks at the table of them."""
    try:
        return bool(parse_boundary(word))
    except ValueError:
        return False


def known_options() -> set[str]:
    """List every flag of the packages, the tools and the examples; their own parsers are not needed for that."""
    sources = (path.read_text() for path in python_files(*PACKAGES, "tools", "examples"))
    options = {option for source in sources for option in re.findall(r"--[a-z][a-z-]+", source)}
    made = add_offload_arguments(argparse.ArgumentParser(add_help=False))._option_string_actions
    return options | set(made) | {f"--{name.replace('_', '-')}" for name in settings()}


def settings() -> set[str]:
    """List fields of megatron-core's configuration that we add, and values of its `recompute_modules`."""
    fields = {row.target.rpartition(".")[2] for row in config_rows() if row.is_new}
    recomputed = {name for row in MODULES for name in (*row.recomputed_by, *row.discarded_by)}
    return fields | recomputed | {"offload_modules"}


def defined_symbols() -> Iterator[str]:
    """Modules, classes, functions and variables of the source, and `Class.member`."""
    for path in (*python_files(*PACKAGES, "tests"), ROOT / "setup.py"):
        for node in ast.parse(path.read_text()).body:
            for name in names_of(node):
                yield name
                if isinstance(node, ast.ClassDef):
                    yield from (f"{name}.{member}" for child in node.body for member in names_of(child))
    yield from PACKAGES


def names_of(node: ast.stmt) -> list[str]:
    """Return what a statement defines."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("name", ["plan.svg", "stations.svg"])
def test_diagrams_are_well_formed(name: str) -> None:
    assert ElementTree.parse(ROOT / "docs" / "images" / name).getroot().tag.endswith("svg")
