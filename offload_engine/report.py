# SPDX-License-Identifier: Apache-2.0
"""Reports on recorded steps: where the bytes went, why a tensor stayed, what moved when.

python -m offload_engine.report trace.json.gz                       tables by module, and of the links
python -m offload_engine.report rank0.json rank1.json --rank 1      of one rank
python -m offload_engine.report trace.json.gz --why core_attn       what became of its saved tensors
python -m offload_engine.report trace.json.gz --moves --group 0.3   moves of one chunk
python -m offload_engine.report trace.json.gz profile.json.gz --merge both.json.gz   one trace of both, for Perfetto
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

from offload_engine._observe.chrome_trace import merge, read_records
from offload_engine._observe.record import StepRecord
from offload_engine._observe.report import moves_text, report_table, why_text
from offload_engine.output import write_out


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _check(parser, options)
    try:
        if options.merge is not None:
            write_out(f"{merge(options.files, options.merge)}\n")
            return 0
        records = [record for file in options.files for record in read_records(file)]
        text = _answer(records, options)
    except re.error as error:
        sys.stderr.write(f"--why {options.why}: not a regular expression: {error}\n")
        return 1
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    write_out(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m offload_engine.report",
        description="Shows what recorded steps moved, kept and waited for; without an option in tables.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="written by a recording; .gz if compressed")
    parser.add_argument("--rank", type=int, metavar="R", help="only the steps of this rank")
    answers = parser.add_mutually_exclusive_group()
    answers.add_argument(
        "--why",
        metavar="PATTERN",
        help="what happened to the saved tensors whose module, group, shape (4096x512), dtype or reason matches",
    )
    answers.add_argument("--moves", action="store_true", help="the moves, one per line")
    answers.add_argument(
        "--merge",
        metavar="TRACE",
        help="write one trace of all files, which may include exports of torch.profiler, for ui.perfetto.dev",
    )
    parser.add_argument("--group", help="with --moves: only those of a group (0.3:5), chunk (0.3) or name")
    return parser


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with an error if an option would have no effect beside another one."""
    if options.merge is not None and options.rank is not None:
        parser.error("argument --rank: not allowed with argument --merge, which merges all ranks of the files")
    if options.group is not None and (options.merge is not None or options.why is not None):
        parser.error("argument --group: only allowed with argument --moves")


def _answer(records: Sequence[StepRecord], options: argparse.Namespace) -> str:
    chosen = [record for record in records if options.rank in (None, record.rank)]
    if not chosen:
        ranks = ", ".join(str(rank) for rank in sorted({record.rank for record in records}))
        raise ValueError(f"no step of rank {options.rank}: the files have ranks {ranks}")
    if options.moves or options.group is not None:
        return moves_text(chosen, options.group or "")
    return report_table(chosen) if options.why is None else why_text(chosen, options.why)


if __name__ == "__main__":
    sys.exit(main())
