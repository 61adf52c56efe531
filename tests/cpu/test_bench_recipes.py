# SPDX-License-Identifier: Apache-2.0
"""benchmarks/run.py recipes, as far as it runs without a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("tqdm")

from benchmarks.gpu.settings import Shape
from benchmarks.recipes import main, settings

CAPTURED = "--graphs layers --scopes attn moe_router moe_preprocess --modules expert_fc1 moe_act"
COMMANDS = [
    "--contenders none taken-over incumbent incumbent@min_offloaded_tensor_size=4096,activation_offload_fraction=0.5",
    "--latents --modules attn_norm core_attn mlp_norm moe_act --recompute layernorm moe_act",
    f"{CAPTURED} --contenders ours@cpu_affinity=True incumbent incumbent@delay_offload_until_cuda_graph=False",
    "--sharding optim_grads_params --contenders none ours@cpu_affinity=True incumbent",
    "--graphs step --contenders none ours",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_model_can_be_configured(command: str) -> None:
    """megatron-core's own checks of a configuration need no GPU."""
    pytest.importorskip("megatron.core", minversion="0.19")
    from benchmarks.gpu.model import make_config
    from offload_engine import OffloadConfig

    jobs = settings.parse(command.split()).jobs
    for job in jobs:
        config = make_config(job.shape, False, **job.config_fields())
        assert config.fine_grained_activation_offloading == (job.contender.kind in ("taken-over", "incumbent"))
        assert config.multi_latent_attention == job.has_latents
        OffloadConfig.from_flags(**job.contender.engine)
    assert [job.contender.label for job in jobs] == settings.parse(command.split()).contenders


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--contenders others", "unknown contender 'others'"),
        ("--contenders none@nmb=1", "of a contender that offloads"),
        ("--scopes attn", "--scopes are of --graphs layers"),
        ("--graphs step --sharding optim", "--sharding is for --graphs none"),
        ("--rounds 0", "must be at least 1"),
    ],
)
def test_mistakes(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings.parse(flags.split())
    assert message in capsys.readouterr().err


def test_summaries_are_of_all_turns_that_ended() -> None:
    def turn(contender: str, *step_ms: float, failure: str | None = None, mib: int = 1) -> dict[str, Any]:
        sizes = {"reserved_bytes": mib << 20, "allocated_bytes": mib << 19}
        return {"contender": contender, "failure": failure, "step_ms": step_ms, **sizes}

    turns = [turn("none", 100.0), turn("ours", 101.0, 103.0, mib=3), turn("none", 120.0), turn("ours", 111.0, mib=2)]
    failed = [{"contender": name, "failure": "out of memory"} for name in ("ours", "incumbent")]
    assert main.summarize([*turns, *failed]) == [
        {"kind": "summary", "contender": "none", "step_ms": 110.0, "over_none": 1.0, **_mib(1, 0)},
        {"kind": "summary", "contender": "ours", "step_ms": 103.0, "over_none": 0.9364, **_mib(3, 2)},
    ]
    assert "over_none" not in main.summarize(turns[1:2])[0]


def _mib(reserved: int, allocated: int) -> dict[str, int]:
    return {"reserved_mib": reserved, "allocated_mib": allocated}


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
