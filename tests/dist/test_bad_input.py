# SPDX-License-Identifier: Apache-2.0
"""Bad input is refused on every rank, before the first forward, and the model trains on once it is corrected."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch  # noqa: E402

from megatron_patches import apply  # noqa: E402
from offload_engine import CopyError, OffloadConfig  # noqa: E402
from tests.dist.launch import Pipeline, run_ranks  # noqa: E402
from tests.dist.logged import messages  # noqa: E402
from tests.dist.tiny import fingerprint, make_chunks, make_config, run  # noqa: E402

SELECTIVE = {"recompute_granularity": "selective"}
# With a bias megatron-core's own recomputation of the MLP never ends: the bias becomes an output of the checkpoint.
MLP = {**SELECTIVE, "recompute_modules": ["mlp"], "add_bias_linear": False}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

# kind of model, names, settings, what the message must hold
REFUSED: list[tuple[str, list[str], dict[str, Any], list[str]]] = [
    ("dense", ["router_fc1"], {}, ["'router_fc1' needs experts", "mlp_fc1", "mlp: MLP"]),
    ("dense", ["core_attn", "moe_act", "router"], {}, ["'moe_act' needs", "'router' needs layers with experts"]),
    ("moe", ["mlp_fc1"], {}, ["'mlp_fc1' needs layers with a dense MLP", "router_fc1", "mlp: MoELayer"]),
    ("moe", ["shared_fc1"], {}, ["'shared_fc1' needs layers with shared experts"]),
    ("dense", ["qkv_linear"], FULL, ["'qkv_linear'", "recompute_granularity='full'", "layer_input"]),
    ("dense", ["mlp_act"], MLP, ["'mlp_act'", "recompute_modules has 'mlp'"]),
    (
        "moe",
        ["router_fc1"],
        {**SELECTIVE, "recompute_modules": ["moe"]},
        ["'router_fc1'", "recompute_modules has 'moe'"],
    ),
    ("dense", ["qkv_linear"], {**SELECTIVE, "recompute_modules": ["layernorm"]}, ["'qkv_linear'", "discarded by"]),
    ("dense", ["core_attn"], {"offload_host_limit_bytes": 2048}, ["2,048", "one hidden activation of 4,096 bytes"]),
    ("dense", ["core_attn"], {"offload_dir": "/nonexistent/directory"}, ["/nonexistent/directory"]),
]


@pytest.mark.parametrize("shape", [Pipeline(), Pipeline(2, 2)], ids=str)
def test_refused_before_the_first_forward(shape: Pipeline) -> None:
    run_ranks(_check_refusals, pipeline=shape, timeout_s=60)


def test_a_name_found_on_another_rank_only_is_fine() -> None:
    run_ranks(_check_split_model, pipeline=Pipeline(2))


def test_a_fault_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    run_ranks(_check_fault_of_one_rank, str(tmp_path), pipeline=Pipeline(2))


def test_an_exception_in_the_model_leaves_nothing_behind() -> None:
    run_ranks(_check_exceptions)


@pytest.mark.parametrize("shape", [Pipeline(), Pipeline(2)], ids=str)
def test_a_host_limit_without_room_for_one_group_ends_the_first_step(shape: Pipeline) -> None:
    run_ranks(_check_small_host_limit, pipeline=shape)


def test_a_full_disk_stops_the_step_and_no_more(tmp_path: Path) -> None:
    run_ranks(_check_full_disk, str(tmp_path))


def test_a_request_that_moves_nothing_says_why_once() -> None:
    (warnings,) = run_ranks(_warnings_of_two_steps, OffloadConfig().min_tensor_bytes)
    assert len(warnings) == 1 and "offload_min_tensor_bytes=1,048,576" in warnings[0]


def test_a_stage_whose_groups_all_stay_says_nothing_where_another_moves_its_own() -> None:
    assert run_ranks(_warnings_of_two_steps, 1, pipeline=Pipeline(2)) == [[], []]


def test_offload_by_default_and_removal() -> None:
    run_ranks(_check_defaults_and_removal)


def _check_refusals() -> None:
    for kind, names, settings, parts in REFUSED:
        with apply(OffloadConfig(min_tensor_bytes=1)) as handle:
            offload = {"offload_activation": True, "offload_modules": names, **settings}
            chunks = make_chunks(make_config(kind, **offload))
            calls = [_count_calls(chunk) for chunk in chunks]
            with pytest.raises((ValueError, OSError)) as error:
                run(chunks, 2)
            missing = [part for part in parts if part not in str(error.value)]
            assert not missing, f"{names} with {settings}: {error.value} lacks {missing}"
            assert handle.engine is None and not any(calls)
            _config_of(chunks).offload_activation = False
            assert run(chunks, 2) or torch.distributed.get_world_size() > 1


def _check_split_model() -> None:
    """Check a model with experts in the upper half of the layers only: the lower stage has no router."""
    with apply(OffloadConfig(min_tensor_bytes=1)) as handle:
        settings = {"moe_layer_freq": [0, 0, 1, 1], "offload_activation": True, "offload_modules": ["router_fc1"]}
        chunks = make_chunks(make_config("moe", **settings))
        run(chunks, 4)
        has_experts = torch.distributed.get_rank() == 1
        assert handle.stats is not None and (handle.stats.num_groups > 0) == has_experts


def _check_fault_of_one_rank(directory: str) -> None:
    rank = torch.distributed.get_rank()
    with apply(OffloadConfig(min_tensor_bytes=1)):
        where = directory if rank == 0 else f"{directory}/missing"
        chunks = make_chunks(make_config(offload_activation=True, offload_modules=["core_attn"], offload_dir=where))
        with pytest.raises((ValueError, OSError), match="missing") as error:
            run(chunks, 2)
        assert rank == 1 or "pipeline rank 1" in str(error.value)


def _check_exceptions() -> None:
    expected = _fingerprint_without_offload()
    names = ["self_attn", "mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2"]
    with apply(OffloadConfig(min_tensor_bytes=1, directory="none")) as handle:
        chunks = make_chunks(make_config(offload_activation=True, offload_modules=names))
        layers = chunks[0].decoder.layers
        for place in (
            layers[1].self_attention.core_attention,
            layers[2].mlp.linear_fc1,
            layers[2].mlp.linear_fc2,
            layers[3].pre_mlp_layernorm,
            chunks[0].output_layer,
        ):
            _fail_once(place, "forward", call=2, run_it=lambda: run(chunks, 3))
            assert _hooks_are_gone() and handle.engine is not None
            assert handle.engine.pool.num_leases == 0 and not handle.engine.is_active
            assert fingerprint(chunks, run(chunks, 3)) == expected, place
        _fail_once(layers[1].mlp, "activation_func", call=2, run_it=lambda: run(chunks, 3))
        assert _hooks_are_gone()
        assert fingerprint(chunks, run(chunks, 3)) == expected
        _fail_in_backward(chunks)
        assert handle.engine is not None and handle.engine.pool.num_leases == 0
        assert fingerprint(chunks, run(chunks, 3)) == expected


def _check_small_host_limit() -> None:
    """The limit holds a hidden activation, which the model is refused for, but not what core attention saves."""
    with apply(OffloadConfig(min_tensor_bytes=1)) as handle:
        offload = {"offload_activation": True, "offload_modules": ["core_attn"], "offload_host_limit_bytes": 4096}
        chunks = make_chunks(make_config(**offload))
        weights = [parameter.detach().clone() for parameter in chunks[0].parameters()]
        with pytest.raises(ValueError, match="pipeline rank 0: offload_host_limit_bytes=4,096 has no room for any of"):
            run(chunks, 3)
        assert handle.engine is None and all(map(torch.equal, chunks[0].parameters(), weights))
        _config_of(chunks).offload_host_limit_bytes = None
        run(chunks, 3)
        assert handle.stats is not None and handle.stats.copied_out_bytes > 0


def _check_full_disk(directory: str) -> None:
    from offload_engine._devices.file_slab import FileSlab

    expected = _fingerprint_without_offload()
    with apply(OffloadConfig(min_tensor_bytes=1, directory=directory), modules=["core_attn", "mlp_fc1"]) as handle:
        chunks = make_chunks(make_config())
        weights = [parameter.detach().clone() for parameter in chunks[0].parameters()]
        for call in (1, 5, 12):
            with _FullAfter(FileSlab, call), pytest.raises(CopyError, match="core_attn|mlp_fc1") as error:
                run(chunks, 3)
            assert "microbatch" in str(error.value) and "No space left" in str(error.value), error.value
            assert handle.engine is not None and handle.engine.pool.num_leases == 0
            assert all(map(torch.equal, chunks[0].parameters(), weights))
            assert fingerprint(chunks, run(chunks, 3)) == expected


class _FullAfter:
    """Writes to the host tier fail from the given one on."""

    def __init__(self, slab: Any, call: int) -> None:
        self._slab, self._left, self._write = slab, call, slab.write

    def __enter__(self) -> None:
        def write(slab: Any, *args: Any) -> None:
            self._left -= 1
            if self._left <= 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            self._write(slab, *args)

        self._slab.write = write

    def __exit__(self, *_: object) -> None:
        self._slab.write = self._write


def _warnings_of_two_steps(min_tensor_bytes: int) -> list[str]:
    """With one layer in a stage of two, so that the last stage keeps all."""
    logged = messages()
    with apply(OffloadConfig(directory="none", min_tensor_bytes=min_tensor_bytes), modules=["core_attn"]):
        chunks = make_chunks(make_config("dense", num_layers=2))
        for _ in range(2):
            run(chunks, 2)
    return logged


def _check_defaults_and_removal() -> None:
    expected = _fingerprint_without_offload()
    config = make_config()
    chunks = make_chunks(config)
    num_hooks = _num_hooks(chunks[0])
    with apply(OffloadConfig(min_tensor_bytes=1, directory="none"), modules=["core_attention", "mlp_act"]) as handle:
        assert fingerprint(chunks, run(chunks, 3)) == expected
        assert handle.stats is not None and handle.stats.copied_out_bytes > 0
        assert _num_hooks(chunks[0]) > num_hooks
    assert _num_hooks(chunks[0]) == num_hooks
    assert fingerprint(chunks, run(chunks, 3)) == expected
    with apply(OffloadConfig(min_tensor_bytes=1, directory="none"), modules=["attn_norm"]) as again:
        assert fingerprint(chunks, run(chunks, 3)) == expected
        assert again.stats is not None and again.stats.copied_out_bytes > 0
        del chunks
        assert again.engine is None, "an engine goes with its model"


def _fingerprint_without_offload() -> dict[str, str]:
    chunks = make_chunks(make_config())
    return fingerprint(chunks, run(chunks, 3))


def _config_of(chunks: list[torch.nn.Module]) -> Any:
    return chunks[0].config


def _count_calls(module: torch.nn.Module) -> list[int]:
    calls: list[int] = []
    module.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


def _num_hooks(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


class _Fault(Exception):
    pass


def _fail_once(owner: Any, name: str, call: int, run_it: Callable[[], Any]) -> None:
    original, calls = getattr(owner, name), []

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise _Fault(name)
        return original(*args, **kwargs)

    setattr(owner, name, fail)
    try:
        with pytest.raises(_Fault):
            run_it()
    finally:
        setattr(owner, name, original)


def _fail_in_backward(chunks: list[torch.nn.Module]) -> None:
    def fail(grad: torch.Tensor) -> None:
        raise _Fault("backward")

    hook = chunks[0].decoder.layers[1].mlp.linear_fc1.weight.register_hook(fail)
    with pytest.raises(_Fault):
        run(chunks, 3)
    hook.remove()


def _hooks_are_gone() -> bool:
    """Tell whether nothing that autograd saves now goes through a hook."""
    x = torch.ones(2, requires_grad=True)
    return (x * x).grad_fn._saved_self is x
