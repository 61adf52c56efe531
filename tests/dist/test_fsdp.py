# SPDX-License-Identifier: Apache-2.0
"""`enable_activation_offloading` under FSDP1, FSDP2 and DDP: the same numbers, the same communication, less memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard

pytest.importorskip("transformers")

from offload_engine import LayerOffload, enable_activation_offloading  # noqa: E402
from offload_engine._budget.summary import BudgetSummary  # noqa: E402
from tests.decoders import SMALL, CountAllGathers, Trace, distribute, make_decoder, train  # noqa: E402
from tests.dist.launch import PlainGroup, run_ranks  # noqa: E402

NUM_LAYERS = 4


class Case(NamedTuple):
    """How a model is checkpointed, and computed."""

    own: str | None = None  # the model's own checkpointing: "plain", "reentrant" or None
    enable_ckpt: bool = False
    is_mixed: bool = False


CASES = [
    Case(),
    Case(enable_ckpt=True),
    Case(own="plain"),
    Case(own="reentrant"),
    Case(own="plain", enable_ckpt=True),
    Case(is_mixed=True),
    Case(enable_ckpt=True, is_mixed=True),
]


class Run(NamedTuple):
    trace: Trace
    num_all_gathers: int
    handle: LayerOffload | None


@pytest.mark.parametrize(
    ("strategy", "world_size", "kind"),
    [("fsdp", 2, "qwen2"), ("fsdp2", 2, "qwen2"), ("ddp", 2, "qwen2"), ("fsdp2", 4, "llama")],
)
def test_losses_and_gradients_are_equal_to_the_last_bit(strategy: str, world_size: int, kind: str) -> None:
    run_ranks(_check_parity, strategy, kind, world_size=world_size, pipeline=PlainGroup())


def _check_parity(strategy: str, kind: str) -> None:
    """Checkpointing or not, and whose, makes no difference to the numbers either."""
    for is_mixed in (False,) if strategy == "ddp" else (False, True):
        plain = _train(strategy, kind, Case(is_mixed=is_mixed), offload=False)
        for case in CASES if kind == "qwen2" else CASES[1::5]:
            if case.is_mixed != is_mixed or (strategy == "ddp" and case.own == "reentrant"):
                continue  # DDP itself refuses reentrant checkpointing here
            run = _train(strategy, kind, case, offload=True)
            assert run.handle is not None
            stats = run.handle.stats
            assert run.trace == plain.trace, case
            assert stats.num_offloaded_groups == NUM_LAYERS - 1 and stats.num_kept_groups == 1, case
            assert stats.copied_in_bytes == stats.copied_out_bytes and stats.num_storages_left == 0, case
            # Recomputation finds the parameters that backward has gathered anyway.
            assert run.num_all_gathers == plain.num_all_gathers, case
            assert (strategy == "ddp") == (plain.num_all_gathers == 0)
            run.handle.remove()


def _train(strategy: str, kind: str, case: Case, offload: bool) -> Run:
    model: Any = make_decoder(kind, NUM_LAYERS)
    if case.own is not None:
        model.gradient_checkpointing_enable({"use_reentrant": case.own == "reentrant"})
    model = distribute(model, strategy, case.is_mixed)
    handle = enable_activation_offloading(model, strategy, case.enable_ckpt, config=SMALL) if offload else None
    with CountAllGathers() as count:
        trace = train(model, num_steps=2, seed=torch.distributed.get_rank())
    return Run(trace, count.num_all_gathers, handle)


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2", "ddp"])
def test_a_rank_checkpoints_by_its_budget_whatever_the_others_do(strategy: str) -> None:
    run_ranks(_check_budget, strategy, world_size=2, pipeline=PlainGroup())


def _check_budget(strategy: str) -> None:
    def run(gpu_budget: int | None) -> Run:
        model = distribute(make_decoder("qwen2", NUM_LAYERS), strategy)
        handle = None
        if gpu_budget is not None:
            config = SMALL.replace(gpu_budget=gpu_budget)
            handle = enable_activation_offloading(model, strategy, config=config)
        with CountAllGathers() as count:
            trace = train(model, num_steps=5, seed=torch.distributed.get_rank())
        return Run(trace, count.num_all_gathers, handle)

    plain, roomy = run(None), run(1 << 40)
    lowest = _summary(roomy).lowest_bytes
    is_first = torch.distributed.get_rank() == 0
    tight = run(lowest if is_first else 1 << 40)
    assert (_summary(tight).recomputed_bytes > 0) == is_first
    assert tight.handle is not None and tight.handle.stats.peak_resident_bytes <= lowest or not is_first
    for each in (roomy, tight):
        assert each.trace == plain.trace
        assert each.num_all_gathers == plain.num_all_gathers


def _summary(run: Run) -> BudgetSummary:
    assert run.handle is not None and run.handle.engine.budget is not None
    summary = run.handle.engine.budget.summary
    assert summary is not None
    return summary


# -- weights ----------------------------------------------------------------------------------------------------------


class SaveDetached(torch.autograd.Function):
    """A linear layer that saves an alias of its weight which has forgotten that it is one, as custom kernels do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight.detach())
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.seen: set[int] = set()  # storages of the gathered parameters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parameters = [self.up.weight, self.up.bias, self.down.weight, self.down.bias]
        self.seen |= {parameter.untyped_storage()._cdata for parameter in parameters}
        return x + SaveDetached.apply(torch.relu(self.up(x)), self.down.weight)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_gathered_parameters_are_never_offloaded(strategy: str, is_mixed: bool) -> None:
    run_ranks(_check_weights, strategy, is_mixed, world_size=2, pipeline=PlainGroup())


def _check_weights(strategy: str, is_mixed: bool) -> None:
    torch.manual_seed(0)
    low = torch.bfloat16 if is_mixed else None
    model: nn.Module = Blocks()
    blocks = list(model.blocks)
    if strategy == "fsdp":
        for i, block in enumerate(blocks):
            model.blocks[i] = FullyShardedDataParallel(
                block, device_id=torch.device("cpu"), mixed_precision=MixedPrecision(param_dtype=low)
            )
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    else:
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        for module in (*blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=low))
    handle = enable_activation_offloading(model, strategy, config=SMALL.replace(min_tensor_bytes=0))
    for _ in range(2):  # the second time they are gathered into storages that have been there before
        loss = model(torch.randn(16, 32, dtype=low)).sum()
        packed = {saved.key for saved in handle.engine._store.live}
        weights = set().union(*(block.seen for block in blocks))
        assert packed and weights
        assert not packed & weights
        loss.backward()
    assert handle.stats.num_offloaded_groups == 2
    handle.remove()
