# SPDX-License-Identifier: Apache-2.0
"""The trainer: every kind of run, with and without offload, to the last bit; resuming; errors before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.programs import EXAMPLES, Run, run_program, train

MODEL = (
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32"),
    *("--global-batch-size", "4", "--train-iters", "3", "--make-vocab-size-divisible-by", "16"),
)
OFFLOAD = "--offload-activation --offload-min-tensor-bytes 1 --offload-dir none"
MOE = "--num-experts 4 --disable-bias-linear --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01"
PP2 = "--pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
OVERLAP = "--bf16 --overlap-moe-expert-parallel-comm"


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a .bin/.idx pair of the first help topics."""
    directory = tmp_path_factory.mktemp("text")
    run_program(EXAMPLES / "prepare_text.py", "--output-prefix", "text", cwd=directory)
    return directory


@pytest.fixture
def directory(text: Path, tmp_path: Path) -> Path:
    """Return a directory for one test, with the text in it."""
    for path in text.glob("text.*"):
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def run(directory: Path, flags: str = "", *, num_ranks: int = 1) -> Run:
    """Run the trainer; the run must succeed."""
    result = train(directory, *MODEL, *flags.split(), num_ranks=num_ranks)
    assert result.status == 0, result.output
    return result


@pytest.mark.parametrize(
    ("num_ranks", "flags", "modules"),
    [
        pytest.param(
            1,
            "--swiglu --position-embedding-type rope --normalization RMSNorm --group-query-attention --qk-layernorm "
            "--num-query-groups 2 --disable-bias-linear --untie-embeddings-and-output-weights "
            "--rampup-batch-size 2 2 4 --lr-decay-style cosine",
            "core_attn mlp_fc1",
            id="llama-like, growing batch",
        ),
        pytest.param(
            2, f"{VPP2} {MOE} --eval-interval 1 --eval-iters 1 --eval-at-start", "core_attn router_fc1", id="vpp2 moe"
        ),
        pytest.param(
            4,
            f"--expert-model-parallel-size 2 {VPP2} {MOE} {OVERLAP} --use-distributed-optimizer --overlap-grad-reduce",
            "layer_input core_attn router_fc1 moe_act",
            id="vpp2 ep2 all-to-all overlap",
        ),
    ],
)
def test_offload_changes_no_bit_and_moves_bytes(directory: Path, num_ranks: int, flags: str, modules: str) -> None:
    plain = run(directory, flags, num_ranks=num_ranks)
    offload = run(directory, f"{flags} {OFFLOAD} --offload-modules {modules}", num_ranks=num_ranks)
    assert offload.curve == plain.curve
    assert [step.get("validation_loss") for step in offload.steps] == [
        step.get("validation_loss") for step in plain.steps
    ]
    for without, having in zip(plain.steps, offload.steps, strict=True):
        assert without["offload"]["copied_out_bytes"] == 0
        # a group whose backward comes before it was released needs no copy-in
        assert 0 < having["offload"]["copied_in_bytes"] <= having["offload"]["copied_out_bytes"]
        before, after = (step["offload"]["peak_resident_saved_bytes"] for step in (without, having))
        assert after < before


def test_the_record_of_a_plan(directory: Path) -> None:
    plain = run(directory, f"{PP2} --train-iters 7", num_ranks=2)
    assert all(step["offload"]["plan"] is None for step in plain.steps)
    flags = f"{PP2} --train-iters 7 --offload-gpu-budget 1GiB --offload-min-tensor-bytes 1B"
    result = run(directory, flags, num_ranks=2)
    assert result.curve == plain.curve
    assert result.steps[0]["offload"]["plan"] is None and result.steps[0]["offload"]["copied_out_bytes"] > 0
    last = result.steps[-1]
    plan, *of_ranks = [figures["offload"]["plan"] for figures in (last, *last["ranks"])]
    assert plan["budget_bytes"] == 1 << 30 and plan["recomputed_bytes"] == 0
    assert 0 < plan["measured_peak_bytes"] <= plan["budget_bytes"] and plan["predicted_step_ms"] > 0
    for name, combine in (("kept_bytes", sum), ("offloaded_bytes", sum), ("predicted_peak_bytes", max)):
        assert plan[name] == combine(rank[name] for rank in of_ranks)
    assert last["offload"]["copied_out_bytes"] == 0


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        pytest.param(1, "--attention-dropout 0.2", id="plain"),
        pytest.param(2, f"{VPP2} {MOE} --bf16 --use-distributed-optimizer", id="vpp2 moe distributed"),
    ],
)
def test_a_resumed_run_repeats_every_bit(directory: Path, num_ranks: int, flags: str) -> None:
    flags += " --train-iters 5 --lr-warmup-iters 2"
    whole = run(directory, flags, num_ranks=num_ranks)
    saved = directory / "checkpoints"
    first = run(directory, f"{flags} --save {saved} --exit-interval 2", num_ranks=num_ranks)
    rest = run(directory, f"{flags} --load {saved}", num_ranks=num_ranks)
    assert first.curve + rest.curve == whole.curve
    assert [step["step"] for step in rest.steps] == [3, 4, 5]


MISTAKES = {
    "--data-path nowhere/text": "nowhere/text.bin does not exist",
    "--pipeline-model-parallel-size 2": "1 processes: --pipeline-model-parallel-size 2 needs a multiple of 2",
    "--num-layers 2 --load {saved}": "num_layers 4 (now 2)",
    "--offload-dir . --offload-resident-bytes 0": (
        "--offload-resident-bytes, --offload-dir without --offload-activation"
    ),
}


def test_mistakes_end_the_run_before_its_first_step(directory: Path) -> None:
    """With one line of explanation."""
    saved = directory / "saved"
    run(directory, f"--train-iters 1 --save {saved}")
    for flags, message in MISTAKES.items():
        result = train(directory, *MODEL, *flags.format(saved=saved).split())
        assert result.status != 0 and result.steps == [] and "Traceback" not in result.output, result.output
        assert "error:" in result.output and message in result.output, result.output


def test_with_no_more_flags_than_the_switch_it_learns_the_built_in_text(directory: Path) -> None:
    """All defaults but for the size, which would take a CPU long."""
    small = ("--hidden-size", "64", "--seq-length", "128", "--lr", "0.01")
    result = train(directory, "--offload-activation", *small, "--eval-interval", "10", has_data=False)
    assert result.status == 0, result.output
    assert len(result.curve) == 10 and result.curve[-1][0] < result.curve[0][0] - 1.0
    assert result.steps[-1]["validation_loss"] < result.curve[0][0] - 1.0
