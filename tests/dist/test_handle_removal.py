# SPDX-License-Identifier: Apache-2.0
"""A handle is removed as a whole or not at all."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core")

from megatron_patches import apply  # noqa: E402
from megatron_patches._rows.recompute import recompute_rows  # noqa: E402
from megatron_patches._rows.registry import Patch, PatchError, apply_patches  # noqa: E402
from offload_engine import OffloadConfig  # noqa: E402
from tests.dist.launch import run_ranks  # noqa: E402
from tests.dist.tiny import engine_of, fingerprint, make_chunks, make_config, run  # noqa: E402

CONFIG = OffloadConfig(min_tensor_bytes=1, directory="none")


def test_a_removal_that_is_refused_leaves_all_in_force() -> None:
    run_ranks(_check_refused)


def _check_refused() -> None:
    chunks = make_chunks(make_config())
    expected = fingerprint(chunks, run(chunks, 2))
    handle = apply(CONFIG, modules=["core_attn"])
    rows = handle._applied.rows
    assert fingerprint(chunks, run(chunks, 2)) == expected
    engine = handle.engine
    assert engine is not None and engine.stats.num_offloaded_groups
    # In the middle of the rows: those behind it would come off first.
    on_top = Patch(target=rows[len(rows) // 2].target, wrapper=lambda original: original, why="it is on top")
    with apply_patches([on_top]):
        with pytest.raises(PatchError, match="'it is on top' was applied after it"):
            handle.remove()
        assert handle._applied.rows == rows
        assert fingerprint(chunks, run(chunks, 2)) == expected
        assert engine_of(handle) is engine and engine.stats.num_offloaded_groups  # it was not closed
    handle.remove()
    handle.remove()
    assert not handle._applied.rows and handle.engine is None
    assert fingerprint(chunks, run(chunks, 2)) == expected


def test_after_its_engines_are_closed_a_step_attaches_none() -> None:
    run_ranks(_check_closed)


def _check_closed() -> None:
    with apply(CONFIG, modules=["core_attn"]) as handle:
        chunks = make_chunks(make_config())
        run(chunks, 2)
        handle._runtime.close()  # its rows are still in force
        run(chunks, 2)
        assert handle.engine is None


def test_rows_of_one_call_may_lie_on_each_other() -> None:
    target = next(row.target for row in recompute_rows(None))  # type: ignore[arg-type]
    rows = [Patch(target=target, wrapper=lambda original: original, why=why) for why in ("first", "second")]
    applied = apply_patches(rows)
    with apply_patches([Patch(target=target, wrapper=lambda original: original, why="third")]):
        with pytest.raises(PatchError, match="first.*'third' was applied after it"):
            applied.remove()
        assert len(applied.rows) == 2
    applied.remove()
    assert not applied.rows
