# SPDX-License-Identifier: Apache-2.0
"""What the documentation says is true: its code runs, its figures were measured, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.dist.programs import ROOT, run_code, run_program

README, DOCS, RESULTS = ROOT / "README.md", ROOT / "docs", ROOT / "docs" / "results"
MIGRATION, PERFORMANCE = DOCS / "migration.md", DOCS / "performance.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(document: Path) -> str:
    """Return the text without its code blocks."""
    return FENCE.sub("", document.read_text())


def blocks(documents: list[Path]) -> list[str]:
    """Return the code blocks in "python", which are programs; "py" is code for other libraries."""
    return [code for path in documents for language, code in FENCE.findall(path.read_text()) if language == "python"]


# What the blocks of the migration page find: a model whose layers save tensors of 2 MiB.
AROUND_MIGRATION = """
import torch
import torch.distributed.fsdp
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


def first_line(code: str) -> str:
    return code.split("\n", 1)[0]


@pytest.mark.parametrize("block", blocks([path for path in DOCUMENTS if path != MIGRATION]), ids=first_line)
def test_python_block_runs(block: str, tmp_path: Path) -> None:
    for package in ("megatron.core", "transformers", "accelerate"):
        if package.partition(".")[0] in block or (package == "accelerate" and "transformers" in block):
            pytest.importorskip(package)
    printed = run_code(block, cwd=tmp_path)
    if "megatron" in block:
        assert "no step yet" in printed
    elif "print(" in block:  # others attach, and leave the steps to the reader
        assert re.search(r"moved [1-9]", printed)


@pytest.mark.skipif(torch.cuda.is_available(), reason="these blocks are tried on the CPU: run where there is no GPU")
@pytest.mark.parametrize("block", blocks([MIGRATION]), ids=first_line)
def test_code_after_migration_runs(block: str, tmp_path: Path) -> None:
    shard = "shard(model)\n" if '"fsdp2"' in block else ""
    assert re.search(r"moved [1-9]", run_code(AROUND_MIGRATION + shard + block, cwd=tmp_path))


def test_plain_pytorch_example(tmp_path: Path) -> None:
    printed = run_program(ROOT / "examples" / "plain_pytorch.py", "2", cwd=tmp_path)[0].out
    assert "equal to the last bit: True" in printed
    peaks = re.findall(r"(\d+) MiB", printed)
    assert int(peaks[1]) < 0.5 * int(peaks[0])


FIGURE = re.compile(r"(?<![\w.,])\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d,])|(?<![\w.,])\d+\.\d+(?![\w.])")
"""A number that is measured: with decimals, or with a comma for thousands."""


def not_measured(text: str, files: list[str]) -> list[str]:
    """Return the figures of a text that are in none of these result files, to their own number of digits."""
    numbers = re.findall(r"\d[\d,]*(?:\.\d+)?", " ".join((RESULTS / name).read_text() for name in files))
    found = [float(number.replace(",", "")) for number in numbers]
    return [
        figure
        for figure in FIGURE.findall(text)
        if not any(
            abs(float(figure.replace(",", "")) - number) <= 0.5000001 * 10 ** -len(figure.partition(".")[2])
            for number in found
        )
    ]


def test_figures_are_measured() -> None:
    """A part that begins with the link of a result file has its figures from it, up to the next heading or link."""
    parts = re.split(r"^(?=\[\d{4}-)|^## ", PERFORMANCE.read_text(), flags=re.MULTILINE)
    checked = []
    for part in parts:
        if names := re.findall(r"\]\((?:docs/)?results/([\w-]+\.jsonl?)\)", part.split("\n", 1)[0]):
            assert not_measured(part, names) == [], names
            checked += FIGURE.findall(part)
    assert len(checked) > 100
    (front_page,) = re.findall(r"^\| you train today.*?\n\n", README.read_text(), re.MULTILINE | re.DOTALL)
    files = ["2026-11-23_megatron_h200.json", "2026-11-23_frontends_h200.json"]
    assert not_measured(front_page, files) == []


def headings(document: Path) -> list[str]:
    return re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE) if document.suffix == ".md" else []


def test_links_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for link in LINK.findall(prose(document)):
            if link.startswith("https://"):
                continue
            path, _, anchor = link.partition("#")
            target = (document.parent / path).resolve() if path else document
            assert target.exists(), f"{document.name} links to {link}, which does not exist"
            anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in headings(target)}
            assert not anchor or anchor in anchors, f"{document.name} links to {link}: no such heading"
