# SPDX-License-Identifier: Apache-2.0
"""`enable_activation_offloading` under FSDP1, FSDP2 and DDP: the same numbers, the same communication, less memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard

from offload_engine import OffloadConfig, enable_activation_offloading
from tests.decoders import SMALL, CountAllGathers, SavesDetached, Trace, distribute, make_decoder, train
from tests.dist.launch import PlainGroup, on_ranks
from tests.dist.programs import ROOT, run_program

pytest.importorskip("transformers")

NUM_LAYERS = 4


class Case(NamedTuple):
    """How a model is checkpointed, and computed."""

    own: str | None = None  # the model's own checkpointing: "plain", "reentrant" or None
    enable_ckpt: bool = False
    is_mixed: bool = False


class Run(NamedTuple):
    trace: Trace
    num_all_gathers: int
    handle: Any


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2", "ddp"])
@on_ranks(PlainGroup(), world_size=2)
def test_losses_and_gradients_are_equal_to_the_last_bit(strategy: str) -> None:
    """Checkpointing or not, and whose, makes no difference to the numbers either."""
    plain = {is_mixed: _train(strategy, Case(is_mixed=is_mixed)) for is_mixed in {strategy != "ddp", False}}
    cases = [Case(), Case(own="plain", enable_ckpt=True)]
    if strategy != "ddp":  # which itself refuses reentrant checkpointing here
        cases += [Case(own="reentrant"), Case(enable_ckpt=True, is_mixed=True)]
    for case in cases:
        run, expected = _train(strategy, case, SMALL), plain[case.is_mixed]
        stats = run.handle.stats
        assert run.trace == expected.trace, case
        assert stats.num_offloaded_groups == NUM_LAYERS - 1 and stats.num_kept_groups == 1, case
        assert stats.copied_in_bytes == stats.copied_out_bytes and stats.num_storages_left == 0, case
        # Recomputation finds the parameters that backward has gathered anyway.
        assert run.num_all_gathers == expected.num_all_gathers, case
        assert (strategy == "ddp") == (expected.num_all_gathers == 0)
        run.handle.remove()


def _train(strategy: str, case: Case, config: OffloadConfig | None = None, num_steps: int = 2) -> Run:
    """Train, with offload if there is a configuration for it."""
    model: Any = make_decoder("qwen2", NUM_LAYERS)
    if case.own is not None:
        model.gradient_checkpointing_enable({"use_reentrant": case.own == "reentrant"})
    model = distribute(model, strategy, case.is_mixed)
    handle = config and enable_activation_offloading(model, strategy, case.enable_ckpt, config=config)
    with CountAllGathers() as count:
        trace = train(model, num_steps=num_steps, seed=torch.distributed.get_rank())
    return Run(trace, count.num_all_gathers, handle)


@on_ranks(PlainGroup(), world_size=2)
def test_a_rank_checkpoints_by_its_budget_whatever_the_others_do() -> None:
    def run(gpu_budget: int) -> Run:
        return _train("fsdp2", Case(), SMALL.replace(gpu_budget=gpu_budget), num_steps=5)

    plain, roomy = _train("fsdp2", Case(), num_steps=5), run(1 << 40)
    lowest = roomy.handle.engine.budget.summary.lowest_bytes
    is_first = torch.distributed.get_rank() == 0
    tight = run(lowest if is_first else 1 << 40)
    assert (tight.handle.engine.budget.summary.recomputed_bytes > 0) == is_first
    assert tight.handle.stats.peak_resident_bytes <= lowest or not is_first
    for each in (roomy, tight):
        assert each.trace == plain.trace
        assert each.num_all_gathers == plain.num_all_gathers


def test_the_example_prints_the_same_losses_without_offload(tmp_path: Path) -> None:
    environment, losses = {"CUDA_VISIBLE_DEVICES": ""}, []
    for flag in ("--no-offload", "--checkpoint"):
        ranks = run_program(ROOT / "examples/fsdp.py", "3", flag, cwd=tmp_path, num_ranks=2, environment=environment)
        losses.append([re.findall(r"rank \d: loss ([\d.]+)", rank.out + rank.err) for rank in ranks])
    assert losses[0] == losses[1]
    assert all(len(of_rank) == 3 and float(of_rank[-1]) < float(of_rank[0]) for of_rank in losses[0])


# -- weights ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.seen: set[int] = set()  # storages of the gathered parameters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen |= {parameter.untyped_storage()._cdata for parameter in self.parameters()}
        return x + SavesDetached.apply(torch.relu(self.up(x)), self.down.weight)


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
@on_ranks(PlainGroup(), world_size=2)
def test_gathered_parameters_are_never_offloaded(strategy: str) -> None:
    for low in (None, torch.bfloat16):
        torch.manual_seed(0)
        blocks = [Block() for _ in range(3)]
        model: Any = nn.Sequential(*blocks)
        if strategy == "fsdp":
            options: Any = {"device_id": torch.device("cpu"), "mixed_precision": MixedPrecision(param_dtype=low)}
            sharded = nn.Sequential(*(FullyShardedDataParallel(block, **options) for block in blocks))
            model = FullyShardedDataParallel(sharded, **options)
        else:
            mesh = torch.distributed.init_device_mesh("cpu", (2,))
            for module in (*blocks, model):
                fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=low))
        handle = enable_activation_offloading(model, strategy, config=SMALL.replace(min_tensor_bytes=0))
        for _ in range(2):  # the second time they are gathered into storages that have been there before
            for block in blocks:
                block.seen.clear()  # others may be where those of the first time were
            loss = model(torch.randn(16, 32, dtype=low)).sum()
            packed = {saved.key for saved in handle.engine._store.live}
            weights = set().union(*(block.seen for block in blocks))
            assert packed and weights and not packed & weights
            loss.backward()
        assert handle.stats.num_offloaded_groups == 2
        handle.remove()
