"""What the experts' linear layers save passes the engine by, unless a group may save it too."""

from __future__ import annotations

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


@pytest.mark.parametrize("settings", [{}, OVERLAP], ids=["called", "as nodes of a plan"])
@pytest.mark.parametrize(
    ("name", "are_packed"),
    [
        ("qkv_linear", {"linear_fc1": False, "linear_fc2": False}),
        ("router_fc2", {"linear_fc1": False, "linear_fc2": True}),
        ("dispatched_tokens", {"linear_fc1": True, "linear_fc2": False}),
    ],
)
def test_hooks_inside_the_linears_of_experts(name: str, are_packed: dict[str, bool], settings: dict[str, Any]) -> None:
    pipeline = Pipeline(expert=2) if settings else Pipeline()
    for seen in run_ranks(_see_hooks, name, settings, pipeline=pipeline):
        assert seen == {**are_packed, "behind": True}, seen


def _see_hooks(name: str, settings: dict[str, Any]) -> dict[str, bool]:
    """Whether hooks pack what is saved inside the two linears of an expert, and behind it."""
    seen: dict[str, bool] = {}

    def note(what: str) -> None:
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            seen[what] = HOOKS(True) is not None

    with apply(ALL, modules=[name]):
        chunks = make_chunks(make_config("moe", torch.bfloat16, **settings))
        for module in (module for chunk in chunks for module in chunk.modules()):
            for what in ("linear_fc1", "linear_fc2"):
                linear = getattr(module, what, None)
                if linear is not None:
                    _on_call(linear, lambda what=what: note(what))
            if hasattr(module, "linear_fc2"):
                module.register_forward_hook(lambda *_: note("behind"))
        run(chunks, 2)
    return seen


def _on_call(module: torch.nn.Module, do: Any) -> None:
    forward = module.forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        do()
        return forward(*args, **kwargs)

    module.forward = noted  # type: ignore[method-assign]


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_an_expert_that_raises_leaves_no_hooks_behind(error: type[BaseException]) -> None:
    """An interrupt does not run the hooks behind a module's forward."""
    run_ranks(_raise_in_expert, error)


def _raise_in_expert(error: type[BaseException]) -> None:
    def fail() -> None:
        if is_failing:
            raise error("in the second expert")

    is_failing = False
    with apply(ALL, modules=["qkv_linear"]):
        chunks = make_chunks(make_config("moe"))
        _on_call(chunks[0].decoder.layers[1].mlp.experts.local_experts[1].linear_fc1, fail)
        expected = run(chunks, 2)
        is_failing = True
        with pytest.raises(error, match="second expert"):
            run(chunks, 2)
        assert HOOKS(True) is None
        is_failing = False
        assert run(chunks, 2) == expected
