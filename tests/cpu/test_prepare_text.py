# SPDX-License-Identifier: Apache-2.0
"""Text becomes Megatron's indexed format, byte by byte, and mistakes are named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def examples_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def documents(prefix: Path) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    return [dataset[index].tolist() for index in range(len(dataset))]


def prepare(*arguments: str) -> int:
    import prepare_text

    return prepare_text.main(list(arguments))


def test_files_become_documents_of_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("Grüße\n")
    (tmp_path / "b.txt").write_text("second\n")
    prefix = tmp_path / "new" / "pair"
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    assert prepare(*files, "--output-prefix", str(prefix)) == 0
    assert documents(prefix) == [[*"Grüße\n".encode(), 256], [*b"second\n", 256]]
    metadata = json.loads((tmp_path / "new" / "pair.json").read_text())
    assert metadata == {"vocab_size": 257, "eod": 256, "num_documents": 2, "num_tokens": 17, "sources": files}
    assert "2 documents, 17 tokens, vocabulary of 257" in capsys.readouterr().out


def test_long_texts_are_cut_at_line_ends(tmp_path: Path) -> None:
    text = b"one\ntwo\n" + b"x" * 20 + b"\nlast"
    (tmp_path / "long.txt").write_bytes(text)
    prefix = tmp_path / "pair"
    assert prepare(str(tmp_path / "long.txt"), "--output-prefix", str(prefix), "--document-bytes", "8B") == 0
    pieces = [bytes(document[:-1]) for document in documents(prefix)]
    assert pieces == [b"one\ntwo\n", b"x" * 20 + b"\n", b"last"]
    assert b"".join(pieces) == text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*input.txt: No such file"),
        (b" \n", "input.txt is empty"),
        (b"abc\0def", "input.txt is not text: it has a zero byte at offset 3"),
    ],
)
def test_a_bad_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    path = tmp_path / "input.txt"
    if content is not None:
        path.write_bytes(content)
    assert prepare(str(path), "--output-prefix", str(tmp_path / "pair")) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "pair.bin").exists()
