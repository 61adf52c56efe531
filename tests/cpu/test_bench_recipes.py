# SPDX-License-Identifier: Apache-2.0
"""benchmarks/run.py recipes, as far as it runs without a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("tqdm")

from benchmarks.gpu.settings import Shape
from benchmarks.recipes import settings


def measure_all(flags: str) -> list[dict[str, Any]]:
    """In one rank, with what only a GPU has replaced: one turn of each contender."""
    from benchmarks.gpu import model
    from benchmarks.recipes import training
    from megatron_patches._rows.without_gpu import TorchWithoutGpu, nothing
    from tests.dist import tiny

    without_gpu: Any = TorchWithoutGpu(torch)
    vars(without_gpu.cuda).update(dict.fromkeys(("empty_cache", "reset_peak_memory_stats"), nothing))
    vars(without_gpu.cuda).update(dict.fromkeys(("max_memory_reserved", "max_memory_allocated"), lambda: 0))
    fields = {"moe_grouped_gemm": False, "hidden_size": tiny.HIDDEN}
    stand_ins: dict[Any, dict[str, Any]] = {
        training: {"torch": without_gpu},
        model: {
            "start_ranks": lambda *args, **kwargs: model.Ranks(0, 1, None),
            "make_config": lambda shape, _, **more: tiny.make_config("moe", torch.bfloat16, **fields, **more),
            "build_chunks": lambda shape, config: tiny.make_chunks(config),
            "Training": partial(model.Training, device="cpu"),
        },
    }
    for module, names in stand_ins.items():
        vars(module).update(names)
    jobs = settings.parse(flags.split()).jobs
    sizes: Any = {"seq": tiny.SEQUENCE, "mbs": tiny.MICRO_BATCH, "nmb": 2, "vocab": tiny.VOCABULARY}
    return [training.measure(job._replace(shape=Shape(**sizes))) for job in jobs]


@pytest.mark.dist
@pytest.mark.parametrize("flags", ["", "--sharding optim_grads_params"])
def test_turns_without_a_gpu(flags: str) -> None:
    pytest.importorskip("megatron.core", minversion="0.19")
    pytest.importorskip("einops", reason="Megatron-FSDP arranges its ranks with it")
    from tests.dist.launch import run_ranks

    engine = "@min_tensor_bytes=1,directory=none"
    taken_over = "taken-over@min_offloaded_tensor_size=1"
    contenders = f"--contenders none ours{engine} {taken_over} --modules core_attn moe_act --iters 2"
    ((none, *both),) = run_ranks(measure_all, f"{contenders} {flags}")
    assert len(none["step_ms"]) == len(none["host_ms"]) == 2 and none["moved_bytes"] == 0
    for turn in both:
        assert turn["moved_bytes"] > 0 and turn["loss"] == none["loss"]
