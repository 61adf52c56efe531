# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of the examples: one token per byte, and an end-of-document token."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class ByteTokenizer:
    """Tokens 0 to 255 are the bytes of UTF-8 text, token 256 ends a document."""

    vocab_size: int = 257
    eod: int = 256

    def tokenize(self, text: bytes) -> list[int]:
        """Return the bytes of one document and the end-of-document token."""
        return [*text, self.eod]

    @property
    def unique_identifiers(self) -> dict[str, str]:
        """Return the key of Megatron's dataset cache."""
        return {"class": type(self).__name__}


@dataclass(frozen=True)
class Metadata:
    """Vocabulary and other facts about a .bin/.idx pair, written next to it for the trainer."""

    vocab_size: int
    eod: int
    num_documents: int
    num_tokens: int
    sources: list[str]

    def write(self, prefix: Path) -> None:
        _path(prefix).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, prefix: Path) -> Metadata:
        """Raises:
        FileNotFoundError: if there is none.
        """
        return cls(**json.loads(_path(prefix).read_text(encoding="utf-8")))


def _path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".json")
