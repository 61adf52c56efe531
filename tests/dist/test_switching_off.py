# SPDX-License-Identifier: Apache-2.0
"""Offload that is switched off between two steps leaves nothing on the model, and can be switched on again."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch  # noqa: E402

from megatron_patches import apply  # noqa: E402
from offload_engine import OffloadConfig  # noqa: E402
from offload_engine.planning.choices import Choices, Slot  # noqa: E402
from tests.dist.launch import Pipeline, run_ranks  # noqa: E402
from tests.dist.tiny import engine_of, fingerprint, make_chunks, make_config, run  # noqa: E402
from tests.lookups import present

NAMES = ["core_attn", "mlp_fc1"]


@pytest.mark.parametrize("shape", [Pipeline(), Pipeline(2)], ids=str)
def test_it_leaves_no_hook_and_no_engine(shape: Pipeline) -> None:
    run_ranks(_check_switching, pipeline=shape, timeout_s=60.0)


def _check_switching() -> None:
    with apply(OffloadConfig(min_tensor_bytes=1, directory="none")) as handle:
        chunks = make_chunks(make_config(offload_activation=True, offload_modules=NAMES))
        config: Any = chunks[0].config
        bare = _num_hooks(chunks)
        steps, engines = [], []
        for is_on in (True, False, False, True, False):
            config.offload_activation = is_on
            steps.append(fingerprint(chunks, run(chunks, 3)))
            assert (_num_hooks(chunks) > bare) == is_on == (handle.engine is not None)
            if handle.engine is not None:
                assert handle.engine.stats.num_groups
                engines.append(handle.engine)
        assert all(step == steps[0] for step in steps)
        assert len({id(engine) for engine in engines}) == 2


def test_what_a_budget_recomputes_is_saved_again() -> None:
    run_ranks(_check_budget)


def _check_budget() -> None:
    with apply(OffloadConfig(min_tensor_bytes=1, directory="none")) as handle:
        chunks = make_chunks(make_config(offload_gpu_budget="1GiB"))
        config: Any = chunks[0].config
        run(chunks, 2)
        attention = chunks[0].decoder.layers[0].self_attention
        present(engine_of(handle).budget).decider.apply(Choices(recomputed=frozenset({Slot(0, 0, "core_attn", 0)})))
        assert attention.checkpoint_core_attention
        config.offload_gpu_budget = None
        run(chunks, 2)
        assert handle.engine is None and not attention.checkpoint_core_attention


def _num_hooks(chunks: list[torch.nn.Module]) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for chunk in chunks for m in chunk.modules())
