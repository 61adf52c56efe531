# SPDX-License-Identifier: Apache-2.0
"""The trainer: every kind of run, with and without offload, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.programs import EXAMPLES, run_program, train

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --global-batch-size 4 --train-iters 3 "
    "--make-vocab-size-divisible-by 16"
)
LLAMA = (
    "--swiglu --position-embedding-type rope --normalization RMSNorm --group-query-attention --num-query-groups 2 "
    "--qk-layernorm --disable-bias-linear --untie-embeddings-and-output-weights --rampup-batch-size 2 2 4 "
    "--lr-decay-style cosine"
)
MOE = (
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-experts 4 --disable-bias-linear "
    "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01"
)
OVERLAP = (
    "--expert-model-parallel-size 2 --bf16 --overlap-moe-expert-parallel-comm --use-distributed-optimizer "
    "--overlap-grad-reduce"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a .bin/.idx pair of the first help topics."""
    directory = tmp_path_factory.mktemp("text")
    run_program(EXAMPLES / "prepare_text.py", "--output-prefix", "text", cwd=directory)
    return directory


@pytest.mark.parametrize(
    ("num_ranks", "flags", "modules"),
    [
        pytest.param(1, LLAMA, "core_attn mlp_fc1", id="llama-like, growing batch"),
        pytest.param(
            2, f"{MOE} --eval-interval 1 --eval-iters 1 --eval-at-start", "core_attn router_fc1", id="vpp2 moe"
        ),
        pytest.param(4, f"{MOE} {OVERLAP}", "layer_input core_attn router_fc1 moe_act", id="all-to-all overlap"),
    ],
)
def test_offload_changes_no_bit_and_moves_bytes(directory: Path, num_ranks: int, flags: str, modules: str) -> None:
    offload = f"--offload-activation --offload-min-tensor-bytes 1 --offload-dir none --offload-modules {modules}"
    runs = [train(directory, *f"{MODEL} {flags} {more}".split(), num_ranks=num_ranks) for more in ("", offload)]
    assert not any(run.status for run in runs), [run.output for run in runs]
    assert runs[0].curve == runs[1].curve
    for without, having in zip(runs[0].steps, runs[1].steps, strict=True):
        assert without.get("validation_loss") == having.get("validation_loss")
        assert without["offload"]["copied_out_bytes"] == 0
        # a group whose backward comes before it was released needs no copy-in
        assert 0 < having["offload"]["copied_in_bytes"] <= having["offload"]["copied_out_bytes"]
        before, after = (step["offload"]["peak_resident_saved_bytes"] for step in (without, having))
        assert after < before


def test_with_no_more_flags_than_the_switch_it_learns_the_built_in_text(directory: Path) -> None:
    """All defaults but for the size, which would take a CPU long."""
    small = ("--hidden-size", "64", "--seq-length", "128", "--lr", "0.01")
    result = train(directory, "--offload-activation", *small, "--eval-interval", "10", has_data=False)
    assert result.status == 0, result.output
    assert len(result.curve) == 10 and result.curve[-1][0] < result.curve[0][0] - 1.0
    assert result.steps[-1]["validation_loss"] < result.curve[0][0] - 1.0
