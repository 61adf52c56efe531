# SPDX-License-Identifier: Apache-2.0
"""The command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.flags import add_flags, input_file, new_parser
from benchmarks.tables import Column, Record, show, table

from .caused import Judged, judge, summarize
from .pauses import compare
from .picture import draw
from .trace import Trace, read_trace


def _ms(name: str) -> Column:
    return lambda row: f"{row[name] / 1e3:.3f}"


_WAITS: dict[str, Column] = {
    "trace": "label",
    "wait": "what",
    "count": "count",
    "longest ms": _ms("longest_us"),
    "total ms": _ms("total_us"),
    "while copying ms": _ms("copying_us"),
    "caused: longest ms": _ms("longest_caused_us"),
    "caused: total ms": _ms("total_caused_us"),
}
_PAUSES: dict[str, Column] = {
    "trace": "label",
    "pause in front of a kernel, or kernel": "pause",
    "count": "count",
    "first ms": _ms("reference_us"),
    "total ms": _ms("total_us"),
    "longer by ms": lambda row: f"{(row['total_us'] - row['reference_us']) / 1e3:.2f}",
    "each by us": lambda row: f"{(row['total_us'] - row['reference_us']) / max(1, row['count']):.2f}",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if the last trace has a longer wait than --limit-ms that a copy caused."""
    args = _parse(arguments)
    from tqdm import tqdm

    found: dict[str, tuple[Trace, list[Judged]]] = {}
    rows: list[Record] = []
    for label, file in tqdm(args.traces, desc="traces", unit="file"):
        trace = read_trace(file)
        found[label] = trace, judge(trace)
        rows += summarize(label, found[label][1])
    pauses: list[Record] = []
    (first, (reference, _)), *others = found.items()
    for label, (trace, _) in others if args.pauses else ():
        pauses += [{"label": label, **row} for row in compare(reference, trace)]
    title = f"the kernels that {first} has too, and the pauses in front of them"
    show(table("host waits of one step", _WAITS, rows, args.markdown), table(title, _PAUSES, pauses, args.markdown))
    if args.picture:
        draw(found, args.picture, args.span_ms * 1e3, 1e3 * (args.limit_ms or 0.1))
    return int(args.limit_ms is not None and rows[-1]["longest_caused_us"] > 1e3 * args.limit_ms)


def _labelled_file(text: str) -> tuple[str, Path]:
    """Parse `LABEL=FILE` of a command line; the label of a file alone is its name up to the first dot."""
    label, separator, file = text.partition("=")
    return (label, input_file(file)) if separator else (Path(text).name.partition(".")[0], input_file(text))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    what = "Host waits in chrome traces of one step, and which of them copies of activations caused."
    parser = new_parser("trace_waits", what)
    files = "of benchmarks/run.py gpu --profile"
    parser.add_argument("traces", nargs="+", type=_labelled_file, metavar="[LABEL=]FILE", help=files)
    add_flags(
        parser,
        ("--pauses", bool, False, "compare kernels, and the pauses in front of them, with those of the first trace"),
        ("--picture", Path, None, "picture of what streams and host did around the longest wait"),
        ("--span-ms", float, 40.0, "how much time it shows"),
        ("--limit-ms", float, None, "fail if a copy caused a longer wait in the last trace"),
        ("--markdown", bool, False, "print the tables as Markdown"),
    )
    args = parser.parse_args(arguments)
    if len({label for label, _ in args.traces}) < len(args.traces):
        parser.error("two files have the same label: write LABEL=FILE")
    if args.pauses and len(args.traces) < 2:
        parser.error("--pauses compares traces with the first one: name another one")
    return args
