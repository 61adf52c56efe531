# SPDX-License-Identifier: Apache-2.0
"""Rows: recomputed inputs are bracketed, the host reads through the engine, the training log has its figures."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("megatron.core")

import numpy  # noqa: E402
import torch  # noqa: E402
from megatron.core.transformer.moe import experts, token_dispatcher  # noqa: E402

from megatron_patches._hooks.bracket import GroupBracket  # noqa: E402
from megatron_patches._hooks.module_hooks import ModuleHooks  # noqa: E402
from megatron_patches._rows.host_reads import HostReads, select  # noqa: E402
from megatron_patches._rows.moe import moe_rows, multihot  # noqa: E402
from megatron_patches._rows.recompute import recompute_rows  # noqa: E402
from megatron_patches._rows.registry import Patch, apply_patches  # noqa: E402
from megatron_patches._training_log import TrainingLog  # noqa: E402
from megatron_patches._versions import installed_version, is_in_range  # noqa: E402
from offload_engine import IterationStats, OffloadConfig, OffloadEngine  # noqa: E402
from offload_engine.stats import StepTimes  # noqa: E402
from tests.graph_device import GraphDevice, GraphWithoutReplay  # noqa: E402

ROWS = [row for row in recompute_rows(SimpleNamespace()) if row.target.endswith((":checkpoint", ":te_checkpoint"))]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.target)
def test_its_call_is_bracketed_and_left_after_an_exception(row: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, name = row.target.partition(":")
    if not is_in_range(installed_version(), row.versions):
        pytest.skip(f"megatron-core {installed_version()} has no such function; needed is {row.versions}")
    owner, runner = importlib.import_module(module), SimpleNamespace()
    monkeypatch.setattr(owner, name, lambda x: f"1 / {x} = {1 // x}")
    active, passive = (
        mock.Mock(**{"enter.return_value": is_active, "commit.return_value": "marked"}) for is_active in (True, False)
    )
    with apply_patches([r for r in recompute_rows(runner) if r.target == row.target]):
        for bracket, expected in ((active, "marked"), (passive, "1 / 1 = 1"), (None, "1 / 1 = 1")):
            runner.checkpoint_bracket = lambda _, bracket=bracket: bracket
            assert getattr(owner, name)(1) == expected
        runner.checkpoint_bracket = lambda _: active
        with pytest.raises(ZeroDivisionError):
            getattr(owner, name)(0)
    call = mock.call
    assert active.mock_calls == [call.enter(), call.commit("1 / 1 = 1"), call.enter(), call.abandon()]
    assert passive.mock_calls == [call.enter()]


def test_inside_a_capture_what_is_recomputed_returns_what_it_has_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor_parallel: Any = importlib.import_module("megatron.core.tensor_parallel")
    monkeypatch.setattr(tensor_parallel, "checkpoint", lambda function, *args: function(*args))
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=1), GraphDevice())
    module, hooks, owner = torch.nn.Linear(4, 4), ModuleHooks(), SimpleNamespace(CUDAGraph=GraphWithoutReplay)
    hooks.enclose(module, GroupBracket(engine, "mlp", Counter()))
    bracket = GroupBracket(engine, "layer_input", Counter())
    with engine.graphs.capture_layers(min_bytes=1, owner=owner, saves_all=False):
        graph: Any = owner.CUDAGraph()
        graph.capture_begin()
        with apply_patches(recompute_rows(SimpleNamespace(checkpoint_bracket=lambda _: bracket))):
            x = torch.ones(4, requires_grad=True)
            assert torch.equal(tensor_parallel.checkpoint(torch.sin, x), x.sin())
            with pytest.raises(ZeroDivisionError):
                tensor_parallel.checkpoint(lambda x: x // 0, 1)
        assert module(torch.ones(2, 4)).shape == (2, 4)
        with pytest.raises(RuntimeError):
            module(torch.ones(2, 3))
        assert engine.graphs.recording is not None and engine.graphs.recording.are_innermost()
        graph.capture_end()
    graph.reset()
    for layers in engine.graphs.layers:
        layers.release()
    engine.close()


def test_without_transformer_engine_its_function_stays_none(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = importlib.import_module("megatron.core.transformer.transformer_block")
    monkeypatch.setattr(owner, "te_checkpoint", None)
    with apply_patches(recompute_rows(SimpleNamespace())):
        assert owner.te_checkpoint is None


class DeviceTensor(torch.Tensor):
    """A tensor that says it is on a GPU, and refuses what would make the host wait for a copy."""

    is_cuda = True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        by_mask = name == "__getitem__" and isinstance(args[1], torch.Tensor) and args[1].dtype is torch.bool
        if by_mask or name in ("cpu", "item", "tolist", "masked_select", "nonzero", "__bool__", "__int__"):
            raise AssertionError(f"the host waits for {name}")
        return super().__torch_function__(func, types, args, kwargs or {})


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(DeviceTensor)


def reader() -> Any:
    """Return an engine whose device reads tensors."""

    def host_read(tensor: torch.Tensor) -> Any:
        plain = tensor.as_subclass(torch.Tensor).clone()
        return SimpleNamespace(tensor=plain, wait=lambda: plain)

    return mock.Mock(**{"device.host_read.side_effect": host_read})


@pytest.fixture
def runner() -> Iterator[Any]:
    """Has the rows applied, and a step running."""
    runner: Any = SimpleNamespace(running_engine=reader())
    with apply_patches(moe_rows(runner)):
        yield runner


def test_a_running_step_reads_through_its_engine(runner: Any) -> None:
    splits, on_host = on_device(torch.arange(4)), torch.arange(4)
    assert token_dispatcher.maybe_move_tensor_to_cpu(splits).tolist() == [0, 1, 2, 3]
    moved = token_dispatcher.maybe_move_tensor_to_cpu(splits, as_numpy=True)
    assert isinstance(moved, numpy.ndarray) and moved.tolist() == [0, 1, 2, 3]
    read = runner.running_engine.device.host_read
    assert read.call_count == 2
    assert token_dispatcher.maybe_move_tensor_to_cpu(on_host) is on_host
    assert token_dispatcher.maybe_move_tensor_to_cpu(None) is None
    with HostReads(runner.running_engine):
        assert on_host.tolist() == [0, 1, 2, 3] and on_host.cpu() is on_host
        assert on_host.masked_select(on_host > 1).tolist() == [2, 3]
    assert read.call_count == 2


def _dispatcher() -> Any:
    """Return an alltoall dispatcher in front of its reads, which it starts and waits for at one point."""
    dispatcher = object.__new__(token_dispatcher.MoEAlltoAllTokenDispatcher)
    dispatcher.drop_and_pad, dispatcher.num_local_experts = False, 1
    dispatcher.cuda_dtoh_point = dispatcher.cuda_sync_point = "before_permutation_1"
    dispatcher.input_splits = dispatcher.output_splits = on_device(torch.arange(2))
    dispatcher.output_splits_tp = dispatcher.num_out_tokens = None
    return dispatcher


@pytest.mark.parametrize("is_running", [True, False])
def test_the_alltoall_dispatcher_reads_on_the_stream_at_hand(is_running: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, side = mock.Mock(), mock.Mock()
    monkeypatch.setattr(token_dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    if not is_running:  # nothing reads on the device, so neither does this test
        monkeypatch.setattr(token_dispatcher, "maybe_move_tensor_to_cpu", lambda tensor, **options: tensor)
    dispatcher = _dispatcher()
    with apply_patches(moe_rows(SimpleNamespace(running_engine=reader() if is_running else None))):
        dispatcher._maybe_dtoh_and_synchronize("before_permutation_1", on_device(torch.arange(2)))
    waits = [mock.call.record_event(), mock.call.record_event().synchronize()]
    assert compute.mock_calls == (waits if is_running else [])
    assert side.mock_calls == ([] if is_running else [mock.call.wait_stream(compute), *waits])
    assert dispatcher.cuda_dtoh_stream is side


def _choices(num_experts: int, masked: bool) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(64, num_experts, generator=generator)
    probs, indices = scores.topk(3)
    return (indices.masked_fill(probs < 0.7, -1) if masked else indices), probs


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_multihot_has_the_bits_of_the_original(dtype: torch.dtype, masked: bool) -> None:
    indices, chosen = _choices(8, masked)
    probs = [chosen.to(dtype).requires_grad_() for _ in range(2)]
    manager = SimpleNamespace(num_local_experts=8)
    # The original takes nothing but float32.
    wanted = token_dispatcher._DeepepManager._indices_to_multihot(manager, indices, probs[0].float())
    got = multihot(indices, probs[1], 8)
    for wanted_one, got_one in zip(wanted, got, strict=True):
        assert got_one.dtype is wanted_one.dtype and got_one.is_contiguous() and torch.equal(got_one, wanted_one)
    grad = torch.randn(64, 8, generator=torch.Generator().manual_seed(5))
    for output in (wanted[1], got[1]):
        output.backward(grad)
    assert torch.equal(probs[0].grad, probs[1].grad)  # type: ignore[arg-type]


def test_multihot_makes_the_host_wait_only_without_a_running_step(runner: Any) -> None:
    indices, probs = (on_device(tensor) for tensor in _choices(8, masked=True))
    manager = SimpleNamespace(num_local_experts=8)
    token_dispatcher._DeepepManager._indices_to_multihot(manager, indices, probs)
    runner.running_engine = None
    with pytest.raises(AssertionError, match="the host waits for __getitem__"):
        token_dispatcher._DeepepManager._indices_to_multihot(manager, indices, probs)


def _allgather(routing_map: torch.Tensor, probs: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    owner = SimpleNamespace(
        routing_map=routing_map, local_expert_indices=[1, 2, 3], config=SimpleNamespace(moe_permute_fusion=False)
    )
    return token_dispatcher.MoEAllGatherTokenDispatcher.dispatch_postprocess(owner, hidden, probs)


def test_allgather_reads_through_the_engine(runner: Any) -> None:
    generator = torch.Generator().manual_seed(4)
    hidden, probs = torch.randn(32, 4, generator=generator), torch.rand(32, 8, generator=generator)
    inputs = (probs > 0.5, probs, hidden)
    got = _allgather(*map(on_device, inputs))
    assert runner.running_engine.device.host_read.called
    runner.running_engine = None
    with pytest.raises(AssertionError, match="the host waits for"):
        _allgather(*map(on_device, inputs))
    assert all(torch.equal(a, b) for a, b in zip(_allgather(*inputs), got, strict=True))


@pytest.mark.parametrize("name", ["TEGroupedMLP", "SequentialMLP"])
def test_experts_get_the_token_counts_on_the_host(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    owner: Any = getattr(experts, name)
    monkeypatch.setattr(owner, "forward", lambda self, hidden, tokens_per_expert, probs: tokens_per_expert)
    counts, runner = on_device(torch.arange(4)), SimpleNamespace(running_engine=reader())
    with apply_patches(moe_rows(runner)):
        plain, *on_device_only = (
            SimpleNamespace(config=SimpleNamespace(**settings))
            for settings in ({}, {"use_transformer_engine_op_fuser": True}, {"moe_use_grouped_tensor": True})
        )
        assert owner.forward(plain, None, counts, None).tolist() == [0, 1, 2, 3]
        assert all(owner.forward(each, None, counts, None) is counts for each in on_device_only)
        assert owner.forward(plain, None, on_host := torch.arange(4), None) is on_host
        runner.running_engine = None
        assert owner.forward(plain, None, counts, None) is counts


def test_selection_has_the_bits_of_masked_select() -> None:
    generator = torch.Generator().manual_seed(4)
    values = [torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
    mask = torch.rand(5, 7, generator=generator) > 0.4
    wanted, got = values[0].masked_select(mask), select(values[1], mask, int(mask.sum()))
    assert torch.equal(got, wanted)
    grad = -torch.zeros_like(wanted)  # a negative zero must not become a positive one
    for output in (wanted, got):
        output.backward(grad)
    assert torch.equal(*(value.grad.view(torch.int32) for value in values))  # type: ignore[union-attr]


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize("has_manager", [True, False])
def test_a_dispatcher_keeps_no_graph_behind_its_forward(runner: Any, is_running: bool, has_manager: bool) -> None:
    """The graph of the router has the input of a recomputation, and its gradient."""
    if not is_running:
        runner.running_engine = None
    dispatcher: Any = object.__new__(token_dispatcher.MoEAllGatherTokenDispatcher)
    dispatcher.hidden_shape = (2, 1)
    owner = dispatcher
    if has_manager:
        owner = dispatcher._comm_manager = SimpleNamespace()
    owner.probs = torch.ones(2, 1, requires_grad=True) * 2
    hidden = owner.probs + 1
    out = dispatcher.combine_postprocess(hidden)
    assert out.grad_fn is not None and owner.probs.tolist() == [[2.0], [2.0]]
    assert (owner.probs.grad_fn is None) == is_running


STATS = IterationStats(num_groups=4, managed_bytes=4 << 30, copied_out_bytes=3 << 30, peak_host_bytes=3 << 30)


SOURCE = """
def training_log(loss_dict, learning_rate, iteration, report_memory_flag, pg_collection=None):
    if iteration % get_args().log_interval == 0:
        print_rank_last(f" iteration {iteration:8d}/ 10 | lm loss: 1.0 |")
    print_rank_last("something else")
    return report_memory_flag

def print_rank_last(message):
    printed.append(message)
"""


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType("megatron.training.training")
    module.printed, module.board, module.wandb = [], mock.Mock(), mock.Mock()
    module.get_args = lambda: SimpleNamespace(log_interval=5)
    module.get_tensorboard_writer, module.get_wandb_writer = lambda: module.board, lambda: module.wandb
    exec(SOURCE, module.__dict__)
    monkeypatch.setitem(sys.modules, "megatron.training", ModuleType("megatron.training"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_the_line_and_both_writers(loop: Any) -> None:
    engine: Any = SimpleNamespace(stats=STATS, timer=mock.Mock(times=StepTimes(800.0, 20.0)))
    log, before = TrainingLog(lambda: engine), (loop.training_log, loop.print_rank_last)
    log.attach(None)
    log.attach(None)
    for iteration in range(1, 6):
        assert loop.training_log({}, 0.1, iteration, report_memory_flag=iteration) == iteration
    assert loop.printed[-2].startswith(" iteration        5/ 10 | lm loss: 1.0 | offload moved (GiB): 3 | ")
    assert {message for message in loop.printed if message != loop.printed[-2]} == {"something else"}
    loop.board.add_scalar.assert_any_call("offload/moved_gib", 3.0, 5)
    [(values, iteration)] = [each.args for each in loop.wandb.log.mock_calls]
    assert loop.board.mock_calls == [mock.call.add_scalar(name, value, iteration) for name, value in values.items()]
    engine.timer.ask.assert_called_once_with()  # of the step that was logged, and of no other
    log.remove()
    assert (loop.training_log, loop.print_rank_last) == before


def test_a_loop_of_another_shape_is_no_reason_to_end(loop: Any, caplog: pytest.LogCaptureFixture) -> None:
    del loop.print_rank_last
    log = TrainingLog(lambda: None)
    log.attach(None)
    assert "the training log will not show offload figures" in caplog.text
    log.remove()
