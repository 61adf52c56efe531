"""What shares no tensor with a group passes the engine by."""

from __future__ import annotations

import functools
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch  # noqa: E402

from megatron_patches import apply  # noqa: E402
from offload_engine import OffloadConfig  # noqa: E402
from tests.dist.launch import Pipeline, run_ranks  # noqa: E402
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
        assert seen == {what: what in packed for what in WATCHED}, seen


def _see_hooks(name: str, settings: dict[str, Any]) -> dict[str, bool]:
    """Submodule -> whether hooks pack what its forward saves."""
    seen: dict[str, bool] = {}

    def note(what: str) -> None:
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            seen[what] = HOOKS(True) is not None

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
