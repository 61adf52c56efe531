# SPDX-License-Identifier: Apache-2.0
"""What the documentation says is true: its code runs, its tables agree with the source, what it names exists."""

from __future__ import annotations

import argparse
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import get_args

import pytest
import torch

from megatron_patches import add_offload_arguments
from megatron_patches._arguments import Settings
from megatron_patches._handle import patch_rows
from megatron_patches._model.modules import MODULES, ModuleRow
from megatron_patches._runtime import ModelRuntime
from megatron_patches._versions import SUPPORTED
from offload_engine import OffloadConfig
from offload_engine.planning.moves import BoundaryKind, Op, parse_boundary
from offload_engine.policies import PolicySettings
from tests.dist.programs import ROOT, run_code, run_program

README, ARCHITECTURE, PLAN = ROOT / "README.md", ROOT / "docs" / "architecture.md", ROOT / "docs" / "plan.md"
MIGRATION, MEGATRON = ROOT / "docs" / "migration.md", ROOT / "docs" / "megatron.md"
CONCEPTS, COMPATIBILITY = ROOT / "docs" / "concepts.md", ROOT / "docs" / "compatibility.md"
TROUBLESHOOTING, RESULTS = ROOT / "docs" / "troubleshooting.md", ROOT / "docs" / "results"
PAGES = sorted((ROOT / "docs" / "pytorch").glob("*.md"))
# Those whose code runs.
DOCUMENTS = [
    README,
    ARCHITECTURE,
    PLAN,
    CONCEPTS,
    MEGATRON,
    ROOT / "docs" / "budget.md",
    ROOT / "docs" / "getting-started.md",
    ROOT / "docs" / "observe.md",
    MIGRATION,
    *PAGES,
]
# Those whose links lead somewhere.
LINKED = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGES = ("offload_engine", "megatron_patches")

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


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


# ---- code ----


@pytest.mark.parametrize("block", list(python_blocks()), ids=lambda code: code.split("\n", 1)[0])
def test_python_block_runs(block: str, tmp_path: Path) -> None:
    if "megatron" in block:
        pytest.importorskip("megatron.core")
        assert "no step yet" in run_code(block, cwd=tmp_path)
    else:
        if "transformers" in block:
            pytest.importorskip("transformers")
            pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")
        if "print(" in block:
            assert_it_offloads(block, tmp_path)
        else:
            run_code(block, cwd=tmp_path)  # it attaches, and leaves the steps to the reader


def assert_it_offloads(code: str, directory: Path) -> None:
    assert re.search(r"moved [1-9]", run_code(code, cwd=directory))


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
    printed = run_program(ROOT / "examples" / "plain_pytorch.py", "2", cwd=tmp_path)[0].out
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
    assert table(section(MEGATRON, "Module names")) == expected, f"the table must read\n{text}"


def test_flags() -> None:
    parser = add_offload_arguments(argparse.ArgumentParser(add_help=False))
    expected = {}
    for action in parser._actions:
        stated = re.search(r"Default: (.*?)\.(?: |$)", action.help or "")
        expected[action.option_strings[0]] = stated[1] if stated else "off"
    rows = table(section(MEGATRON, "Flags"))
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
    assert stated == re.findall(r"^(\d)\. (.+?): ", section(CONCEPTS, "Concepts"), re.MULTILINE)


def test_versions() -> None:
    cells = {row[0]: row[1:] for row in table(section(COMPATIBILITY, "What is supported")) if len(row) == 3}
    setup = (ROOT / "pyproject.toml").read_text()
    pins = [dict(re.findall(r"^([\w-]+)==([\w.]+)$", path.read_text(), re.MULTILINE)) for path in constraints()]
    oldest, newest = re.findall(r"[\d.]+\d", SUPPORTED)
    assert newest == "0.21" and cells["megatron-core"][0] == f"{oldest} to 0.19.x, 0.20 from a checkout"
    assert cells["torch"][0] == re.search(r"torch>=([\d.]+)", setup)[1] + " and later"  # type: ignore[index]
    te = re.search(r"transformer-engine\[pytorch\]>=([\d.]+)", setup)
    assert te and cells["TransformerEngine"][0] == f"{te[1]} and later, or none"
    for pin in pins:
        assert pin["torch"] in cells["torch"][1] and pin["megatron-core"] in cells["megatron-core"][1]
        assert pin.get("transformer_engine", "none") in cells["TransformerEngine"][1]


def constraints() -> list[Path]:
    return sorted(ROOT.glob("constraints-py3*.txt"))


def package_text() -> str:
    return "".join(path.read_text() for folder in PACKAGES for path in sorted((ROOT / folder).rglob("*.py")))


def test_messages_that_troubleshooting_explains_are_raised() -> None:
    """The first column has parts of messages, with `...`, `N` and `M` for what varies."""
    source = re.sub(r'"\s*\n\s*f?"', "", package_text())  # one string of those that Python would join
    for heading in ("Warnings", "Errors"):
        for message, *_ in table(section(TROUBLESHOOTING, heading)):
            for part in re.split(r"\.\.\.|\b[NM]\b", message.partition(" (`")[0].replace("`", "")):
                assert part.strip() in source, f"no message has {part.strip()!r}"


# ---- figures ----

MARK = re.compile(r"\]\((?:docs/)?results/([\w-]+\.jsonl?)\)")
FIGURE = re.compile(r"(?<![\w.,])\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d,])|(?<![\w.,])\d+\.\d+(?![\w.])")


def figures_of(text: str) -> list[str]:
    """Return the numbers of a text that are measured: those with decimals, or with a comma for thousands."""
    return FIGURE.findall(text)


def measured(names: list[str]) -> list[float]:
    """Return all numbers in result files."""
    text = " ".join((RESULTS / name).read_text() for name in names)
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def is_measured(figure: str, found: list[float]) -> bool:
    """Return whether a figure is one of those found, to its own number of digits."""
    value, digits = float(figure.replace(",", "")), len(figure.partition(".")[2])
    return any(abs(value - number) <= 0.5000001 * 10**-digits for number in found)


def test_figures_of_the_performance_page_are_measured() -> None:
    """A part that begins with the link of a result file has its figures from it, up to the next heading or link."""
    text = (ROOT / "docs" / "performance.md").read_text()
    parts = re.split(r"^(?=\[\d{4}-)|^## ", text, flags=re.MULTILINE)
    checked = 0
    for part in parts:
        if names := MARK.findall(part.split("\n", 1)[0]):
            found = measured(names)
            wrong = [figure for figure in figures_of(part) if not is_measured(figure, found)]
            assert not wrong, f"{names} has none of {wrong}"
            checked += len(figures_of(part))
    assert checked > 100


MEGATRON_RESULTS, FRONTENDS_RESULTS = "2026-11-23_megatron_h200.json", "2026-11-23_frontends_h200.json"
# Row by row of the front page's table: file, table, what is in the cells of the row there, and the column.
FRONT_PAGE = [
    (MEGATRON_RESULTS, "long sequences", ("dense, 65,536", "this engine"), "throughput over full recomputation"),
    (MEGATRON_RESULTS, "long sequences", ("dense, 65,536", "this engine"), "over full recomputation"),
    (MEGATRON_RESULTS, "one GPU", ("b, this engine, `core_attn,expert_fc1`",), "over none"),
    (MEGATRON_RESULTS, "one GPU", ("b, megatron-core, `core_attn,expert_fc1`",), "over none"),
    (MEGATRON_RESULTS, "one GPU", ("b, this engine, `core_attn,expert_fc1`",), "allocated"),
    (MEGATRON_RESULTS, "one GPU", ("b, megatron-core, `core_attn,expert_fc1`",), "allocated"),
    (
        FRONTENDS_RESULTS,
        "longest sequence",
        ("checkpointing of norms, attention and MLP each, `offload_wrapper`",),
        "trained, tokens",
    ),
    (FRONTENDS_RESULTS, "longest sequence", ("checkpointing",), "trained, tokens"),
    (FRONTENDS_RESULTS, "4,096 tokens", ("`enable_activation_offloading`",), "over none"),
    (FRONTENDS_RESULTS, "4,096 tokens", ("checkpointing",), "over none"),
]


def result(file: str, name: str, cells: tuple[str, ...], column: str) -> str:
    """Return one figure of a result file: of the first row of a table whose first cells begin so, and end so if one."""
    (found,) = [t for t in json.loads((RESULTS / file).read_text())["tables"] if t["table"] == name]
    for row in found["rows"]:
        values = list(row.values())
        if all(
            value == cell if len(cells) == 1 else value.startswith(cell)
            for value, cell in zip(values, cells, strict=False)
        ):
            return str(row[column])
    raise AssertionError(f"{file} has no row {cells} in {name}")


def test_figures_of_the_front_page_are_measured() -> None:
    (rows,) = re.findall(r"^\| you train today.*?\n\n", README.read_text(), re.MULTILINE | re.DOTALL)
    figures = [figure for figure in figures_of(re.sub(r"\(?\b(65,536|4,096) tokens", "", rows))]
    assert len(figures) == len(FRONT_PAGE)
    for figure, place in zip(figures, FRONT_PAGE, strict=True):
        assert is_measured(figure, [float(result(*place).replace(",", ""))]), f"{figure}: measured is {result(*place)}"


def test_result_files_say_how_they_were_made() -> None:
    for path in RESULTS.glob("*.json"):
        result = json.loads(path.read_text())
        about = result.get("run", result)
        for run in result.get("tables", [about]):
            assert (run.get("command") or run["note"]) and run["date"], path.name
        assert about["device"], path.name


# ---- names ----


@pytest.mark.parametrize("document", LINKED, ids=name_of)
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


@pytest.mark.parametrize("name", ["plan.svg", "stations.svg"])
def test_diagrams_are_well_formed(name: str) -> None:
    assert ElementTree.parse(ROOT / "docs" / "images" / name).getroot().tag.endswith("svg")
