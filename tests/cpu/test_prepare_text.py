# SPDX-License-Identifier: Apache-2.0
"""Text becomes Megatron's indexed format, byte by byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

EXAMPLES = Path(__file__).parents[2] / "examples"


def prepare(*arguments: str) -> int:
    import prepare_text

    return prepare_text.main(list(arguments))


@pytest.fixture(autouse=True)
def examples_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_files_become_documents_of_bytes_that_are_cut_at_line_ends(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    (tmp_path / "a.txt").write_text("Grüße\n")
    (tmp_path / "b.txt").write_bytes(b"one\ntwo\n" + b"x" * 20 + b"\nlast")
    prefix = tmp_path / "new" / "pair"
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    assert prepare(*files, "--output-prefix", str(prefix), "--document-bytes", "8B") == 0
    dataset = IndexedDataset(str(prefix))
    pieces = ["Grüße\n".encode(), b"one\ntwo\n", b"x" * 20 + b"\n", b"last"]
    assert [dataset[index].tolist() for index in range(len(dataset))] == [[*piece, 256] for piece in pieces]
    metadata = json.loads((tmp_path / "new" / "pair.json").read_text())
    assert metadata == {"vocab_size": 257, "eod": 256, "num_documents": 4, "num_tokens": 45, "sources": files}
