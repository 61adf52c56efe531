# SPDX-License-Identifier: Apache-2.0
"""The command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.flags import bytes_flag
from benchmarks.tables import Rows, labelled_file, mistake_in

from .caused import Judged, judge, summarize
from .pauses import compare
from .trace import Trace, read_trace

_COLUMNS = ("count", "longest_us", "total_us", "copying_us", "longest_caused_us", "total_caused_us")
_HEAD = ("trace", "wait", "count", "longest ms", "total ms", "while copying ms", "caused: longest ms", "total ms")
_PAUSES = (
    "trace",
    "pause in front of a kernel, or kernel",
    "count",
    "first ms",
    "total ms",
    "longer by ms",
    "each by us",
)
_EXAMPLES = """examples:
  %(prog)s trace.json.gz
  %(prog)s none=a.json.gz ours=b.json.gz --pauses
  %(prog)s none=a.json.gz ours=b.json.gz incumbent=c.json.gz --picture waits.png --limit-ms 0.1"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if the last trace has a longer wait than --limit-ms that a copy caused."""
    args = _parse(arguments)
    from tqdm import tqdm

    found: dict[str, tuple[Trace, list[Judged]]] = {}
    rows: list[dict[str, Any]] = []
    for label, file in tqdm(args.traces, desc="traces", unit="file"):
        trace = read_trace(file)
        found[label] = trace, judge(trace, args.activation_bytes)
        rows += summarize(label, found[label][1])
    waits = [(row["label"], row["what"], *_numbers(row)) for row in rows]
    Rows("host waits of one step", _HEAD, waits, num_words=2).print(args.markdown)
    pauses = _pauses(found, args.activation_bytes) if args.pauses else []
    if pauses:
        title = f"the kernels that {args.traces[0][0]} has too, and the pauses in front of them"
        lines = [(row["label"], row["pause"], *_differences(row)) for row in pauses]
        Rows(title, _PAUSES, lines, num_words=2).print(args.markdown)
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *pauses]))
    if args.picture:
        from .picture import draw

        draw(found, args.picture, args.activation_bytes, args.span_ms * 1e3, 1e3 * (args.limit_ms or 0.1))
    return int(args.limit_ms is not None and rows[-1]["longest_caused_us"] > 1e3 * args.limit_ms)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/run.py trace_waits",
        description="Host waits in chrome traces of one step, and which of them copies of activations caused.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "traces", nargs="+", type=labelled_file, metavar="[LABEL=]FILE", help="of benchmarks/run.py gpu --profile"
    )
    parser.add_argument(
        "--activation-bytes",
        type=bytes_flag(),
        default=1 << 20,
        metavar="SIZE",
        help="copies of activations have so many bytes or more (default: 1MiB)",
    )
    parser.add_argument(
        "--pauses",
        action="store_true",
        help="compare kernels, and the pauses in front of them, with the same kernels in the first trace",
    )
    parser.add_argument("--picture", type=Path, metavar="PNG", help="what streams and host did around the longest wait")
    parser.add_argument("--span-ms", type=float, default=40.0, metavar="MS", help="how much time it shows")
    parser.add_argument(
        "--limit-ms", type=float, metavar="MS", help="fail if a copy caused a longer wait in the last trace"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="one JSON object a row of the table")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    args = parser.parse_args(arguments)
    if mistake := mistake_in(args.traces):
        parser.error(mistake)
    if args.pauses and len(args.traces) < 2:
        parser.error("--pauses compares traces with the first one: name another one")
    return args


def _pauses(found: Mapping[str, tuple[Trace, list[Judged]]], activation_bytes: int) -> list[dict[str, Any]]:
    (_, (reference, _)), *others = found.items()
    return [
        {"label": label, **row} for label, (trace, _) in others for row in compare(reference, trace, activation_bytes)
    ]


def _numbers(row: dict[str, Any]) -> tuple[str, ...]:
    return (str(row["count"]), *(f"{row[name] / 1e3:.3f}" for name in _COLUMNS[1:]))


def _differences(row: dict[str, Any]) -> tuple[str, ...]:
    first, last = row["reference_us"], row["total_us"]
    each = f"{(last - first) / row['count']:.2f}" if row["count"] else ""
    return (str(row["count"]), f"{first / 1e3:.2f}", f"{last / 1e3:.2f}", f"{(last - first) / 1e3:.2f}", each)
