# SPDX-License-Identifier: Apache-2.0
"""The command line."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.tables import Rows, labelled_file, mistake_in

from .growths import Growth, History, read_history

_MIB = 1 << 20
_HEAD = ("history", "asked by", "for MiB", "grew by MiB", "reserved before", "allocated", "free", "largest free MiB")
_EXAMPLES = """examples:
  python3 benchmarks/run.py reserved_memory history.pickle
  python3 benchmarks/run.py reserved_memory none=a.pickle ours=b.pickle --last 5 --markdown"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 2 where a file holds no history."""
    args = _parse(arguments)
    from tqdm import tqdm

    found: dict[str, History] = {}
    for label, file in tqdm(args.histories, desc="histories", unit="file"):
        try:
            found[label] = read_history(file)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
    lines = [_line(label, growth) for label, history in found.items() for growth in history.growths[-args.last :]]
    Rows("last growths of what is reserved", _HEAD, lines, num_words=2).print(args.markdown)
    for label, history in found.items():
        peaks = (history.peak_reserved_bytes, history.peak_allocated_bytes)
        print(f"{label}: peak reserved {_mib(peaks[0])} MiB, peak allocated {_mib(peaks[1])} MiB")
    if args.json:
        rows = [
            {"label": n, **dataclasses.asdict(growth)} for n, history in found.items() for growth in history.growths
        ]
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/run.py reserved_memory",
        description="The requests for which torch's allocator reserved more memory, and what was free at that moment.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "histories",
        nargs="+",
        type=labelled_file,
        metavar="[LABEL=]FILE",
        help="files of run.py gpu --memory-history or torch.cuda.memory._dump_snapshot(); the device with the "
        "longest history is read. Files are unpickled: read only your own",
    )
    parser.add_argument("--last", type=int, default=8, metavar="N", help="how many growths of each history to print")
    parser.add_argument("--json", type=Path, metavar="FILE", help="one JSON object for each growth")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    args = parser.parse_args(arguments)
    if args.last < 1:
        parser.error("--last must be at least 1")
    if mistake := mistake_in(args.histories):
        parser.error(mistake)
    return args


def _line(label: str, growth: Growth) -> tuple[str, ...]:
    sizes = (growth.request_bytes, growth.nbytes, growth.reserved_bytes, growth.allocated_bytes, sum(growth.free_bytes))
    return (label, growth.asked_by, *map(_mib, sizes), " ".join(_mib(nbytes) for nbytes in growth.free_bytes[:4]))


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.0f}"
