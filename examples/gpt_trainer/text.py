# SPDX-License-Identifier: Apache-2.0
"""Samples of the text that every Python carries, its help topics: nothing is downloaded or written."""

from __future__ import annotations

import torch
from byte_tokenizer import ByteTokenizer
from prepare_text import TextError, help_topics

from gpt_trainer.arguments import UsageError


class BuiltInText:
    """Samples of one part of the text, in an order that the seed gives; each byte is a token.

    Args:
        part: shares of the text at which the samples begin and end, from 0 to 1.
        seq_length: tokens of a sample.
        seed: of the order.

    Raises:
        UsageError: if this Python has no such text, or the part is shorter than a sample.
    """

    def __init__(self, part: tuple[float, float], seq_length: int, seed: int) -> None:
        tokens = _tokens()
        begin, end = (int(share * len(tokens)) for share in part)
        self._tokens = tokens[begin:end]
        self._seq_length = seq_length
        num_samples = (len(self._tokens) - 1) // seq_length
        if num_samples < 1:
            raise UsageError(
                f"the built-in text has {len(self._tokens):,} tokens in this part of --split, less than --seq-length "
                f"{seq_length:,}: give --data-path, or --mock-data for made-up tokens"
            )
        self._order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed)).tolist()

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        begin = self._order[index] * self._seq_length
        window = self._tokens[begin : begin + self._seq_length + 1]
        return {
            "tokens": window[:-1],
            "labels": window[1:],
            "loss_mask": torch.ones(self._seq_length),
            "position_ids": torch.arange(self._seq_length),
        }


def _tokens() -> torch.Tensor:
    tokenizer = ByteTokenizer()
    try:
        return torch.tensor([token for text in help_topics().values() for token in tokenizer.tokenize(text)])
    except TextError as error:
        raise UsageError(f"without --data-path: {error}") from error
