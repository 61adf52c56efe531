# SPDX-License-Identifier: Apache-2.0
"""Formats recorded steps as text: where the bytes went, why a tensor stayed, and the moves one by one."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Final

from rich.console import Console, RenderableType
from rich.table import Table

from offload_engine._observe.fold import ModuleRow, ModuleSums, RankSums, fold, numbers_text, sums_of, why_rows
from offload_engine._observe.reasons import ADVICE
from offload_engine._observe.record import StepRecord
from offload_engine.counted import counted
from offload_engine.sizes import short_size
from offload_engine.stats import IterationStats

WIDTH: Final = 140
_PATH_WIDTH: Final = 43  # decoder.layers.*.self_attention.linear_proj
_MIB: Final = 1 << 20


def report_table(records: Iterable[StepRecord]) -> str:
    """Return the tables of recorded steps, one record for each rank: modules, then links."""
    return table_of_ranks([sums_of(record) for record in records])


def table_of_ranks(ranks: Sequence[RankSums]) -> str:
    """Return the same tables, made from the sums of the ranks."""
    return as_text(module_table(ranks), link_table(ranks)) if ranks else "no step was recorded\n"


def why_text(records: Sequence[StepRecord], pattern: str = "") -> str:
    """Return the table that answers "why was X not offloaded?"; see `why_rows` for the pattern."""
    return as_text(why_table(records, pattern))


def summary_of_stats(stats: IterationStats) -> str:
    """Summarize the counters of an iteration that was not recorded."""
    lines = [f"{stats.num_offloaded_groups} of {counted(stats.num_groups, 'group')} offloaded: {stats}"]
    if stats.num_kept_groups:
        kept = counted(stats.num_kept_groups, "group")
        lines.append(f"{kept} kept, {short_size(stats.kept_bytes)}: the backward comes at once")
    if stats.num_host_limit_groups:
        stayed = counted(stats.num_host_limit_groups, "group")
        lines.append(f"{stayed} stayed, the host tier had no room: raise host_limit_bytes")
    if stats.prefetch_misses:
        lines.append("late: their backward waited for the whole copy. Raise horizon_bytes, or offload less")
    if not stats.num_offloaded_groups and stats.num_groups:
        lines.append(
            "nothing was offloaded: record a step to see why"
            if stats.managed_bytes
            else "nothing was offloaded: no saved tensor can move. Lower min_tensor_bytes, or record a step to see why"
        )
    return "\n".join(lines) + "\n"


def moves_text(records: Iterable[StepRecord], group: str = "") -> str:
    """Return the moves, one per line: host time, boundary, move, name and size.

    Args:
        records: of any number of ranks.
        group: only of this group (`0.3:5`), chunk (`0.3`) or name.
    """
    lines = []
    for record in records:
        names = {g.group: g.name for g in record.groups}
        lines.append(f"rank {record.rank}, step {record.step}")
        for move in record.moves:
            name = names.get(move.group, "")
            if group in ("", move.group, move.group.partition(":")[0], name):
                what = f"{move.op.value:<4} {move.group}"
                lines.append(f"{move.host_ms:10.3f} ms  {move.boundary:<12} {what:<14} {name} {_mib(move.nbytes)} MiB")
    return "\n".join(lines) + "\n"


def module_table(ranks: Sequence[RankSums]) -> Table:
    """Return the table by stage and module; bytes and waits are sums over the layers and ranks of a row."""
    steps = numbers_text(rank.step for rank in ranks)
    rows = fold(row for rank in ranks for row in rank.rows)
    longest = max((len(row.module) for row in rows), default=0)
    table = Table(title=f"Saved tensors by module, step {steps}, MiB", title_justify="left")
    for name in ("rank", "stage", "layers"):
        table.add_column(name, overflow="fold")
    table.add_column("module", overflow="fold", min_width=min(longest, _PATH_WIDTH))
    for name in ("groups", "moved", "kept", "too small"):
        table.add_column(name, justify="right")
    table.add_column("not moved, and why", overflow="fold")
    table.add_column("exposed\nwait, ms", justify="right")
    total, has_groups = ModuleSums(), True
    for row in rows:
        if has_groups and not row.sums.num_groups:
            table.add_section()
            has_groups = False
        total.add(row.sums)
        table.add_row(*_place_cells(row), *_sum_cells(row.sums))
    table.add_section()
    table.add_row("", "", "", "all", *_sum_cells(total))
    return table


def link_table(ranks: Iterable[RankSums]) -> Table:
    """Return the table of the copies; ranks with the same stages share a row, with the worst of each figure."""
    table = Table(title="Links and waits", title_justify="left")
    table.add_column("rank", overflow="fold")
    table.add_column("stage", overflow="fold")
    names = ("step, ms", "out, MiB", "GB/s", "of the step", "in, MiB", "GB/s", "of the step")
    for name in (*names, "waited, ms", "of the step", "late"):
        table.add_column(name, justify="right")
    alike: dict[tuple[int, ...], list[RankSums]] = {}
    for rank in ranks:
        alike.setdefault(rank.stages, []).append(rank)
    for stages, group in sorted(alike.items()):
        table.add_row(numbers_text(rank.rank for rank in group), numbers_text(stages), *_link_cells(group))
    return table


def _link_cells(ranks: Sequence[RankSums]) -> list[str]:
    cells = [f"{max(rank.duration_ms for rank in ranks):,.1f}"]
    for uses in ([rank.copied_out for rank in ranks], [rank.copied_in for rank in ranks]):
        shares = [_share(use.busy_ms, rank) for use, rank in zip(uses, ranks, strict=True)]
        slowest = min((use.gbps for use in uses if use.nbytes), default=0.0)
        cells += [_mib(max(use.nbytes for use in uses)), f"{slowest:.1f}", f"{max(shares):.0%}"]
    waited = f"{max(rank.waited_ms for rank in ranks):,.1f}", f"{max(_share(r.waited_ms, r) for r in ranks):.0%}"
    return [*cells, *waited, str(max(rank.num_late for rank in ranks))]


def why_table(records: Sequence[StepRecord], pattern: str = "") -> Table:
    """Return the table of saved tensors that match, folded where they are alike, with what to do about each."""
    table = Table(title="What became of saved tensors", title_justify="left")
    for name in ("rank", "stage", "layers", "group", "module", "shape", "dtype"):
        table.add_column(name, overflow="fold")
    for name in ("tensors", "MiB"):
        table.add_column(name, justify="right")
    for name in ("reason", "what to do"):
        table.add_column(name, overflow="fold")
    for row in why_rows(records, pattern):
        place = (numbers_text(row.ranks), str(row.stage), numbers_text(row.layers), row.group, row.module)
        shape = "x".join(map(str, row.shape)) or "scalar"
        cells = (shape, row.dtype, str(row.num_tensors), _mib(row.nbytes), row.reason.value, ADVICE[row.reason])
        table.add_row(*place, *cells)
    return table


def as_text(*parts: RenderableType) -> str:
    """Return tables as plain text."""
    target = io.StringIO()
    Console(file=target, width=WIDTH, color_system=None).print(*parts, sep="\n")
    return "\n".join(line.rstrip() for line in target.getvalue().splitlines()) + "\n"


def counts_of(stats: IterationStats) -> dict[str, int]:
    """Return the counters of an iteration, for `Recorder.finish`."""
    return asdict(stats)


def _place_cells(row: ModuleRow) -> tuple[str, ...]:
    return numbers_text(row.ranks), numbers_text(row.stages), numbers_text(row.layers), row.module


def _sum_cells(sums: ModuleSums) -> tuple[str, ...]:
    stayed = ", ".join(f"{reason.value} {_mib(n)}" for reason, n in sorted(sums.stayed_bytes.items(), key=_most_first))
    sizes = (_mib(sums.moved_bytes), _mib(sums.kept_bytes), _mib(sums.small_bytes))
    return str(sums.num_groups), *sizes, stayed, f"{sums.wait_ms:,.1f}"


def _most_first(item: tuple[object, int]) -> int:
    return -item[1]


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.1f}"


def _share(milliseconds: float, rank: RankSums) -> float:
    return milliseconds / rank.duration_ms if rank.duration_ms > 0 else 0.0
