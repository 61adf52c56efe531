"""What shares no tensor with a group passes the engine by."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("megatron.core")

import torch  # noqa: E402

from megatron_patches import apply  # noqa: E402
from megatron_patches._bracket import RestPause  # noqa: E402
from megatron_patches._modules import MODULES  # noqa: E402
from offload_engine import OffloadConfig  # noqa: E402
from offload_engine._saved import TensorGroup  # noqa: E402
from offload_engine._store import ActivationStore  # noqa: E402
from tests.dist.launch import Pipeline, run_ranks  # noqa: E402
from tests.dist.models import LATENT  # noqa: E402
from tests.dist.tiny import make_chunks, make_config, run  # noqa: E402

ALL = OffloadConfig(min_tensor_bytes=1, directory="none")
HOOKS = torch._C._autograd._top_saved_tensors_default_hooks
OVERLAP = {"overlap_moe_expert_parallel_comm": True, "expert_model_parallel_size": 2}
WATCHED = ("core_attention", "router", "linear_fc1", "linear_fc2", "final_layernorm")


@pytest.mark.parametrize("settings", [{}, OVERLAP], ids=["called", "as nodes of a plan"])
@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("qkv_linear", {"core_attention", "final_layernorm"}),
        ("router_fc2", {"linear_fc2", "final_layernorm"}),
        ("dispatched_tokens", {"router", "linear_fc1", "final_layernorm"}),
        ("mlp_norm", {"router", "final_layernorm"}),
    ],
)
def test_where_hooks_pack_what_is_saved(name: str, packed: set[str], settings: dict[str, Any]) -> None:
    pipeline = Pipeline(expert=2) if settings else Pipeline()
    for seen in run_ranks(_see_hooks, name, settings, pipeline=pipeline):
        assert seen == {what: {what in packed} for what in WATCHED}, seen


def _see_hooks(name: str, settings: dict[str, Any]) -> dict[str, set[bool]]:
    """Submodule -> whether hooks pack what its forwards save."""
    seen: dict[str, set[bool]] = {}

    def note(what: str) -> None:
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            seen.setdefault(what, set()).add(HOOKS(True) is not None)

    with apply(ALL, modules=[name]):
        chunks = make_chunks(make_config("moe", torch.bfloat16, **settings))
        for path, module in (entry for chunk in chunks for entry in chunk.named_modules()):
            what = path.rpartition(".")[2]
            if what in WATCHED:
                _on_call(module, functools.partial(note, what))
        run(chunks, 2)
    return seen


def _on_call(module: torch.nn.Module, do: Any) -> None:
    forward = module.forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        do()
        return forward(*args, **kwargs)

    module.forward = noted  # type: ignore[method-assign]


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "shared experts": ("mixed", {"moe_shared_expert_intermediate_size": 32}),
    "latent attention": ("moe", LATENT),
    "further tokens": ("moe", {"mtp_num_layers": 1}),
    "recomputed": ("mixed", {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}),
}


@pytest.mark.parametrize(
    ("model", "settings"),
    [*((model, {}) for model in MODELS), ("shared experts", OVERLAP), ("latent attention", OVERLAP)],
    ids=lambda value: value if isinstance(value, str) else "as nodes of a plan" if value else "called",
)
def test_what_passes_by_is_saved_by_no_group(model: str, settings: dict[str, Any]) -> None:
    """Each name alone: were it otherwise, the group would free nothing, or what somebody reads."""
    pipeline = Pipeline(expert=2) if settings else Pipeline()
    counts = run_ranks(_check_disjoint, model, settings, pipeline=pipeline)
    assert all(num_passed > 0 for num_passed in counts), counts


def _check_disjoint(model: str, settings: dict[str, Any]) -> int:
    """How many storages passed the engine by."""
    kind, own = MODELS[model]
    num_passed = 0
    for row in MODULES:
        config = {**own, **settings, "offload_activation": True, "offload_modules": [row.name]}
        recorder = _Recorder()
        try:
            with apply(ALL), recorder.recording():
                run(make_chunks(make_config(kind, torch.bfloat16, **config)), 2)
        except ValueError:  # this model has it not, or recomputes it
            continue
        assert recorder.grouped and not recorder.passed.keys() & recorder.grouped.keys(), (model, row.name)
        num_passed += len(recorder.passed)
    return num_passed


class _Recorder:
    """The storages that autograd saves in groups, and those that it saves in pauses; alive, so that none is another."""

    def __init__(self) -> None:
        self.grouped: dict[int, torch.UntypedStorage] = {}
        self.passed: dict[int, torch.UntypedStorage] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        pack, enter, leave = ActivationStore.pack, RestPause.enter, RestPause.leave
        hooks = torch.autograd.graph.saved_tensors_hooks(self._note_passed, lambda tensor: tensor)
        is_on = []

        def noting_pack(store: ActivationStore, tensor: torch.Tensor, group: TensorGroup) -> Any:
            if not group.is_rest:
                _note(tensor, self.grouped)
            return pack(store, tensor, group)

        def noting_enter(pause: RestPause, *args: Any) -> None:
            enter(pause, *args)
            if HOOKS(True) is None and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                hooks.__enter__()
                is_on.append(True)

        def noting_leave(pause: RestPause, *args: Any) -> None:
            if is_on:
                is_on.pop()
                hooks.__exit__()
            leave(pause, *args)

        with (
            mock.patch.object(ActivationStore, "pack", noting_pack),
            mock.patch.object(RestPause, "enter", noting_enter),
            mock.patch.object(RestPause, "leave", noting_leave),
        ):
            yield

    def _note_passed(self, tensor: torch.Tensor) -> torch.Tensor:
        _note(tensor, self.passed)
        return tensor.detach() if tensor.grad_fn is not None else tensor


def _note(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> None:
    if not isinstance(tensor, torch.nn.Parameter) and tensor.numel() > 1:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage


@pytest.mark.parametrize("settings", [{}, OVERLAP], ids=["called", "as nodes of a plan"])
@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_an_expert_that_raises_leaves_no_hooks_behind(error: type[BaseException], settings: dict[str, Any]) -> None:
    """An interrupt does not run the hooks behind a module's forward."""
    run_ranks(_raise_in_expert, error, settings, pipeline=Pipeline(expert=2) if settings else Pipeline())


def _raise_in_expert(error: type[BaseException], settings: dict[str, Any]) -> None:
    def fail() -> None:
        if is_failing:
            raise error("in an expert")

    is_failing = False
    with apply(ALL, modules=["qkv_linear"]):
        chunks = make_chunks(make_config("moe", torch.bfloat16, **settings))
        _on_call(chunks[0].decoder.layers[1].mlp.experts, fail)
        expected = run(chunks, 2)
        is_failing = True
        with pytest.raises(error, match="in an expert"):
            run(chunks, 2)
        assert HOOKS(True) is None
        is_failing = False
        assert run(chunks, 2) == expected
