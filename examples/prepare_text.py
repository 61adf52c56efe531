#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turns text files into Megatron's indexed format (PREFIX.bin, PREFIX.idx), one token per byte.

Without files it takes the Python help topics that every CPython carries: almost half a megabyte of real English.

    python examples/prepare_text.py --output-prefix data/topics
    python examples/prepare_text.py book.txt notes/*.txt --output-prefix data/books
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from byte_tokenizer import ByteTokenizer, Metadata
from tqdm import tqdm

from offload_engine.sizes import bytes_flag


class TextError(Exception):
    """Raised if an input or output cannot be used; the message says which and why."""


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        metadata = prepare(args.files, args.output_prefix, document_bytes=args.document_bytes)
    except TextError as error:
        print(f"prepare_text.py: error: {error}", file=sys.stderr)
        return 1
    print(
        f"{args.output_prefix}.bin, .idx: {metadata.num_documents:,} documents, {metadata.num_tokens:,} tokens, "
        f"vocabulary of {metadata.vocab_size} (256 bytes and an end-of-document token)"
    )
    return 0


def prepare(files: Sequence[Path], prefix: Path, *, document_bytes: int) -> Metadata:
    """Tokenise the files (none: the help topics) and write PREFIX.bin, .idx and .json.

    Args:
        document_bytes: longer texts are cut at line ends into documents of at most this many bytes, so that a
            training and a validation set can be made from a single file.

    Raises:
        TextError: for a file that cannot be read or holds no text, or a place that cannot be written.
    """
    texts = dict(_read(path) for path in files) if files else help_topics()
    documents = [document for text in texts.values() for document in split_text(text, document_bytes)]
    _make_directory(prefix.parent)
    tokenizer = ByteTokenizer()
    num_tokens = _write_dataset(documents, prefix, tokenizer)
    sources = [str(path) for path in files] or ["pydoc_data/topics.py"]
    metadata = Metadata(tokenizer.vocab_size, tokenizer.eod, len(documents), num_tokens, sources)
    metadata.write(prefix)
    return metadata


def help_topics() -> dict[str, bytes]:
    """Return the texts behind Python's `help()`, by topic.

    Raises:
        TextError: if this Python was built without them.
    """
    try:
        from pydoc_data import topics
    except ImportError as error:
        raise TextError(f"this Python has no pydoc_data.topics ({error}); name text files instead") from error
    return {name: text.encode() for name, text in sorted(topics.topics.items())}


def split_text(text: bytes, document_bytes: int) -> Iterator[bytes]:
    """Cut a text at line ends into pieces of at most `document_bytes` bytes (a longer line stays whole)."""
    lines: list[bytes] = []
    size = 0
    for line in text.splitlines(keepends=True):
        if lines and size + len(line) > document_bytes:
            yield b"".join(lines)
            lines, size = [], 0
        lines.append(line)
        size += len(line)
    if lines:
        yield b"".join(lines)


def _read(path: Path) -> tuple[str, bytes]:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise TextError(f"cannot read {path}: {error.strerror}") from error
    if not text.strip():
        raise TextError(f"{path} is empty")
    if b"\0" in text:
        raise TextError(f"{path} is not text: it has a zero byte at offset {text.index(0):,}")
    return str(path), text


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TextError(f"cannot create {directory}: {error.strerror}") from error


def _write_dataset(documents: Sequence[bytes], prefix: Path, tokenizer: ByteTokenizer) -> int:
    """Write the pair; return the number of tokens."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder  # takes seconds: not for --help

    num_tokens = 0
    try:
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(tokenizer.vocab_size))
        for document in tqdm(documents, desc="tokenizing", unit="doc"):
            tokens = tokenizer.tokenize(document)
            builder.add_document(torch.tensor(tokens), [len(tokens)])
            num_tokens += len(tokens)
        builder.finalize(f"{prefix}.idx")
    except OSError as error:
        raise TextError(f"cannot write {prefix}.bin and .idx: {error.strerror}") from error
    return num_tokens


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="text files (default: Python's help topics)")
    parser.add_argument("--output-prefix", type=Path, required=True, help="PREFIX of PREFIX.bin, .idx and .json")
    parser.add_argument(
        "--document-bytes",
        type=_positive,
        default=16384,
        metavar="SIZE",
        help="cut longer texts at line ends into documents of this size, as 16KiB (default: %(default)s)",
    )
    return parser


def _positive(text: str) -> int:
    value = bytes_flag()(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be positive, got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
