# SPDX-License-Identifier: Apache-2.0
"""GPT samples from a .bin/.idx pair, cut into the microbatches of each step."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import torch
from byte_tokenizer import ByteTokenizer, Metadata
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import get_blend_from_list

from gpt_trainer.arguments import UsageError
from gpt_trainer.text import BuiltInText

Batch = dict[str, torch.Tensor]
Dataset: TypeAlias = GPTDataset | BuiltInText
MOCK_VOCAB_SIZE = 1024
_FIELDS = ("tokens", "labels", "loss_mask", "position_ids")


class DataError(UsageError):
    """Raised if data cannot be used; the message says what to change."""


def vocabulary(args: argparse.Namespace) -> ByteTokenizer:
    """Return the vocabulary size of the data: `--vocab-size`, or that of the metadata beside the first data set.

    Raises:
        DataError: if a data set is given, and neither is there, or it is missing.
    """
    prefixes = _prefixes(args)
    for prefix in prefixes:
        for suffix in (".bin", ".idx"):
            if not prefix.with_name(prefix.name + suffix).is_file():
                raise DataError(f"{prefix}{suffix} does not exist; examples/prepare_text.py makes such a pair")
    if args.vocab_size is not None:
        if not prefixes and not args.mock_data and args.vocab_size < ByteTokenizer.vocab_size:
            raise DataError(f"--vocab-size {args.vocab_size}: the built-in text needs {ByteTokenizer.vocab_size}")
        return ByteTokenizer(vocab_size=args.vocab_size, eod=args.vocab_size - 1)
    if args.mock_data:
        return ByteTokenizer(vocab_size=MOCK_VOCAB_SIZE, eod=MOCK_VOCAB_SIZE - 1)
    if not prefixes:
        return ByteTokenizer()
    try:
        metadata = Metadata.read(prefixes[0])
    except FileNotFoundError as error:
        raise DataError(f"{error.filename} does not exist: give --vocab-size") from error
    return ByteTokenizer(vocab_size=metadata.vocab_size, eod=metadata.eod)


def _prefixes(args: argparse.Namespace) -> list[Path]:
    paths = args.data_path or []
    return [Path(path) for path in (paths[1::2] if len(paths) > 1 else paths)]


def build_datasets(
    args: argparse.Namespace, tokenizer: ByteTokenizer, num_train: int, num_valid: int
) -> tuple[Dataset, Dataset | None]:
    """Build training and validation sets; those of files have at least the given numbers of samples.

    Raises:
        DataError: if the validation share of `--split` holds no sample.
    """
    if not (args.data_path or args.mock_data):
        return _built_in(args, num_valid > 0)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None if args.mock_data else get_blend_from_list(args.data_path),
        split=args.split,
        path_to_cache=None if args.data_cache_path is None else str(args.data_cache_path),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    dataset_class = MockGPTDataset if args.mock_data else GPTDataset
    sizes = [num_train, num_valid, 0]
    train, valid, _ = BlendedMegatronDatasetBuilder(dataset_class, sizes, lambda: True, config).build()
    if train is None or (num_valid > 0 and valid is None):
        raise DataError(f"--split {args.split} leaves no documents for {'training' if train is None else 'validation'}")
    return train, valid


def _built_in(args: argparse.Namespace, has_valid: bool) -> tuple[Dataset, Dataset | None]:
    train, valid, _ = parse_and_normalize_split(args.split)
    parts = [(0.0, train), (train, train + valid)] if has_valid else [(0.0, train)]
    sets = [BuiltInText(part, args.seq_length, args.seed) for part in parts]
    return sets[0], sets[1] if has_valid else None


def microbatches(
    args: argparse.Namespace, dataset: Dataset, first_sample: int, count: int, device: torch.device
) -> Iterator[Batch]:
    """Yield this data-parallel rank's next `count` microbatches, from global sample `first_sample` on.

    Yields:
        tokens, labels, position_ids and loss_mask, each [micro batch size, sequence length / context ranks].
    """
    stride = args.micro_batch_size * parallel_state.get_data_parallel_world_size()
    first = first_sample + args.micro_batch_size * parallel_state.get_data_parallel_rank()
    for index in range(count):
        begin = first + index * stride
        samples = [dataset[number % len(dataset)] for number in range(begin, begin + args.micro_batch_size)]
        batch = {key: torch.stack([sample[key] for sample in samples]).to(device) for key in _FIELDS}
        yield {key: _context_share(tensor) for key, tensor in batch.items()}


def _context_share(tensor: torch.Tensor) -> torch.Tensor:
    """Return this context-parallel rank's part of a sequence: the n-th piece from the front and the n-th from the back.

    Under a causal mask late tokens cost more than early ones; this gives every rank the same work.
    """
    num_ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    if num_ranks == 1:
        return tensor
    pieces = tensor.chunk(2 * num_ranks, dim=1)
    return torch.cat([pieces[rank], pieces[-1 - rank]], dim=1)
