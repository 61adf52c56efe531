# SPDX-License-Identifier: Apache-2.0
"""What bypasses the engine: modules that share no tensor with a group, and weights of grouped experts.

Of what the linear layer of all experts saves, the engine takes the input, once.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

from megatron_patches import apply
from megatron_patches._hooks.bracket import HooksPause
from megatron_patches._model import experts
from megatron_patches._model.modules import MODULES
from offload_engine import OffloadConfig
from offload_engine._saved.storage import TensorGroup
from offload_engine._saved.store import ActivationStore
from tests.dist.launch import Pipeline, on_ranks
from tests.dist.models import LATENT, GroupedLinear, GroupedProduct
from tests.dist.settings import OVERLAP, selective
from tests.dist.tiny import ALL, innermost_hooks, make_chunks, make_config, run
from tests.lookups import import_or_skip

WAYS = pytest.mark.parametrize("shape", [Pipeline(), Pipeline(expert=2)], ids=["called", "as nodes of a plan"])
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {"qk_layernorm": True}),
    "shared experts": ("mixed", {"moe_layer_freq": [0, 1], "moe_shared_expert_intermediate_size": 32}),
    "latent attention": ("moe", LATENT),
    "further tokens": ("moe", {"mtp_num_layers": 1}),
    "recomputed": ("mixed", selective("core_attn", "mlp", moe_layer_freq=[0, 1])),
}


@WAYS
@on_ranks()
def test_tensors_that_bypass_the_engine_are_in_no_group(shape: Pipeline) -> None:
    """Each name alone: were it otherwise, the group would free nothing, or bytes that are still read."""
    for model in ("shared experts", "latent attention") if shape.expert > 1 else MODELS:
        kind, own = MODELS[model]

        def train(offload: dict[str, Any], kind: str = kind, own: dict[str, Any] = own) -> None:
            config = make_config(kind, torch.bfloat16, **{**own, **_way(shape), "num_layers": 2, **offload})
            run(make_chunks(config), 1)

        assert num_passing(train) > 0, model


def _way(shape: Pipeline) -> dict[str, Any]:
    return OVERLAP if shape.expert > 1 else {}


# -- linear layers of all experts --------------------------------------------------------------------------------------


@pytest.mark.compat
@WAYS
@on_ranks()
def test_weights_go_through_no_hooks(shape: Pipeline) -> None:
    """Autograd gives a parameter itself back where no hooks have packed it. Quantised, anything may be saved."""
    for name, is_quantized in (
        *(("expert_fc1", False), ("expert_fc1", True), ("dispatched_tokens", False)),
        *(("qkv_linear", False), ("qkv_linear", True)),
    ):
        is_offloaded = name != "qkv_linear"  # there all that the experts save passes by
        with apply(ALL, modules=[name]), mock.patch.object(experts, "_will_quantize", lambda linear: is_quantized):  # noqa: B023
            chunks = _make_chunks(shape)
            saved: list[tuple[torch.Tensor, ...]] = []  # what the backward of each linear layer of experts gets back
            backward = GroupedProduct.backward

            def noting(ctx: Any, *grads: torch.Tensor, saved: list[Any] = saved, backward: Any = backward) -> Any:
                saved.append(ctx.saved_tensors)
                return backward(ctx, *grads)

            with mock.patch.object(GroupedProduct, "backward", staticmethod(noting)):
                run(chunks, 2)
            linears = [moe.experts.linear_fc1 for moe in chunks[0].modules() if hasattr(moe, "experts")]
            _check_left(chunks)
        weights = {weight.data_ptr(): weight for linear in linears for weight in linear.weights}
        num_experts = linears[0].num_gemms
        of_fc1 = [tensors for tensors in saved if tensors[-1].data_ptr() in weights]
        assert of_fc1
        for tensors in of_fc1:
            is_whole = is_offloaded and not is_quantized
            assert len(tensors) == num_experts + (1 if is_whole else num_experts)
            are_themselves = {weights[tensor.data_ptr()] is tensor for tensor in tensors[-num_experts:]}
            assert are_themselves == {not (is_offloaded and is_quantized)}


@pytest.mark.compat
@WAYS
@pytest.mark.parametrize("names", [["expert_fc1", "moe_act"], ["qkv_linear"]], ids=["its input", "nothing of it"])
@on_ranks()
def test_one_that_raises_is_left_as_it_was(names: list[str], shape: Pipeline) -> None:
    """Before and behind the saving of its input. An interrupt does not run the hooks behind a module's forward."""
    function = GroupedProduct.apply
    with apply(ALL, modules=names):
        chunks = _make_chunks(shape)
        expected = run(chunks, 2)
        for error, is_behind in itertools.product((ArithmeticError, KeyboardInterrupt), (False, True)):

            def raising(*args: Any, error: type[BaseException] = error, is_behind: bool = is_behind) -> None:
                if is_behind:
                    function(*args)
                raise error("in an expert")

            with mock.patch.object(GroupedProduct, "apply", raising), pytest.raises(error, match="in an expert"):
                run(chunks, 2)
            assert innermost_hooks(True) is None
            _check_left(chunks)
            assert run(chunks, 2) == expected


class Others(GroupedLinear):
    """Saves more behind what its base saves."""

    def forward(self, tokens: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, None]:
        out, _ = super().forward(tokens, counts)
        return out + tokens.tanh(), None


class Forwarding(ActivationWrapper):
    """Passes on the attributes of what it wraps, as what torch.compile wraps does, too."""

    def forward(self, *args: Any) -> Any:
        return self._checkpoint_wrapped_module(*args)

    forward.__module__ = GroupedLinear.forward.__module__


def _linear(kind: type[GroupedLinear] = GroupedLinear) -> Any:
    return kind(2, 4, 4, init_method=torch.nn.init.ones_)


@pytest.mark.compat
def test_of_other_classes_nothing_is_known() -> None:
    plain, others = _linear(), _linear(Others)
    found = [*experts.linears_of_experts(torch.nn.ModuleList([plain, others, Forwarding(plain), Forwarding(others)]))]
    assert found == [plain]


ARGS = (torch.ones(4, 4), [2, 2])


@pytest.mark.compat
def test_linear_layer_that_casts_may_save_more() -> None:
    other_kind = _linear()
    other_kind.weights[0] = type("Quantized", (torch.nn.Parameter,), {})(torch.ones(4, 4))
    assert experts.saves_only_weights_behind(_linear(), ARGS)
    for linear, args in ((_linear().half(), ARGS), (other_kind, ARGS), (_linear(), ())):
        assert not experts.saves_only_weights_behind(linear, args)
    with torch.autocast("cpu", torch.bfloat16):
        assert not experts.saves_only_weights_behind(_linear(), ARGS)


@pytest.mark.compat
def test_whether_its_input_is_quantised_is_asked_of_transformer_engine() -> None:
    import_or_skip("transformer_engine.pytorch")
    for is_quantized in (False, True):
        linear = _linear()
        with mock.patch("megatron.core.fp8_utils.FP8GlobalStateManager.is_fp8_enabled", lambda: is_quantized):  # noqa: B023
            assert experts.saves_only_weights_behind(linear, ARGS) == (not is_quantized)
            linear.will_execute_quantized = lambda is_quantized: not is_quantized
            assert experts.saves_only_weights_behind(linear, ARGS) == is_quantized


@pytest.mark.compat
@pytest.mark.parametrize("is_debugged", [None, False, True])
def test_where_it_is_debugged_or_cannot_be_asked_all_goes_through_hooks(is_debugged: bool | None) -> None:
    """A debugged one looks at the input in its backward once more."""
    fp8 = mock.Mock(FP8GlobalStateManager=mock.Mock(is_fp8_enabled=lambda: False))
    modules = {
        "transformer_engine": mock.Mock(),
        "transformer_engine.debug.pytorch.debug_state": mock.Mock(TEDebugState=mock.Mock(debug_enabled=is_debugged)),
        "megatron.core.fp8_utils": None if is_debugged is None else fp8,
    }
    with mock.patch.dict(sys.modules, modules), mock.patch("megatron.core.fp8_utils", fp8):
        assert experts.saves_only_weights_behind(_linear(), ARGS) == (is_debugged is False)


def _make_chunks(shape: Pipeline) -> list[Any]:
    return make_chunks(make_config("moe", torch.bfloat16, moe_grouped_gemm=True, **_way(shape)))


def _check_left(chunks: list[torch.nn.Module]) -> None:
    linears = [module for chunk in chunks for module in chunk.modules() if isinstance(module, GroupedLinear)]
    assert linears and not any(linear.save_original_input for linear in linears)


# -- the storages that autograd saves in groups, and those that bypass the engine --------------------------------------


def num_passing(run: Callable[[dict[str, Any]], object]) -> int:
    """How many storages pass the engine by, over all names of the table; each name alone. Not with the compiled core.

    Args:
        run: a few microbatches of a new model, with these settings of its configuration.

    Raises:
        AssertionError: if a group of that name saves one of them, too.
    """
    num_passed = 0
    directory = None if torch.cuda.is_available() else "none"
    for row in MODULES:
        recorder = SavedStorages()
        try:
            with apply(OffloadConfig(min_tensor_bytes=1, directory=directory), has_report=False), recorder.recording():
                run({"offload_activation": True, "offload_modules": [row.name]})
        except ValueError as error:
            if "offload_modules" not in str(error):  # this model has it not, or recomputes it
                raise
            continue
        assert recorder.grouped and not recorder.passed.keys() & recorder.grouped.keys(), row.name
        num_passed += len(recorder.passed)
    return num_passed


class SavedStorages:
    """The storages that autograd saves in groups, and those that it saves in pauses; alive, so that none is another."""

    def __init__(self) -> None:
        self.grouped: dict[int, torch.UntypedStorage] = {}
        self.passed: dict[int, torch.UntypedStorage] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        pack, enter, leave = ActivationStore.pack, HooksPause.enter, HooksPause.end
        hooks = torch.autograd.graph.saved_tensors_hooks(self._note_passed, lambda tensor: tensor)
        is_on = []

        def noting_pack(store: ActivationStore, tensor: torch.Tensor, group: TensorGroup) -> Any:
            if not group.is_ungrouped:
                _note(tensor, self.grouped)
            return pack(store, tensor, group)

        def noting_enter(pause: HooksPause, *args: Any) -> None:
            enter(pause, *args)
            if innermost_hooks(True) is None and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                hooks.__enter__()
                is_on.append(True)

        def noting_leave(pause: HooksPause, *args: Any) -> None:
            if is_on:
                is_on.pop()
                hooks.__exit__()
            leave(pause, *args)

        pauses = mock.patch.multiple(HooksPause, enter=noting_enter, end=noting_leave)
        with mock.patch.object(ActivationStore, "pack", noting_pack), pauses:
            yield

    def _note_passed(self, tensor: torch.Tensor) -> torch.Tensor:
        _note(tensor, self.passed)
        return tensor.detach() if tensor.grad_fn is not None else tensor


def _note(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> None:
    if not isinstance(tensor, torch.nn.Parameter) and tensor.numel() > 1:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
