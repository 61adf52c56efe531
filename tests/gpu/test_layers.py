# SPDX-License-Identifier: Apache-2.0
"""`enable_activation_offloading` on one GPU: the same numbers, less memory."""

from __future__ import annotations

from operator import eq
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")

from benchmarks.shared_gpus import gpu_of  # noqa: E402
from offload_engine import OffloadConfig, enable_activation_offloading  # noqa: E402
from tests.decoders import SMALL, VOCABULARY, distribute, loss_of, make_decoder, train  # noqa: E402
from tests.gpu.parity import deterministic_algorithms, peak_of_second, run_twice  # noqa: E402

CONFIG = SMALL.replace(directory=None)
MIB = 1 << 20


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("own", [None, "plain", "reentrant"])
@pytest.mark.parametrize("enable_ckpt", [False, True])
def test_losses_and_gradients_are_equal_to_the_last_bit(kind: str, own: str | None, enable_ckpt: bool) -> None:
    model: Any = make_decoder(kind, device="cuda")
    if own is not None:
        model.gradient_checkpointing_enable({"use_reentrant": own == "reentrant"})
    handle = enable_activation_offloading(model, "none", enable_ckpt, config=CONFIG)
    assert train(model) == run_twice(lambda: train(make_decoder(kind, device="cuda")), eq)
    assert handle.stats.num_offloaded_groups >= 3 and handle.stats.num_storages_left == 0
    handle.remove()


@pytest.mark.parametrize("enable_ckpt", [False, True])
def test_memory_goes_down(enable_ckpt: bool) -> None:
    """Two layers of sixteen are on the device, instead of all; a fifth is left to the allocator, and to copies."""
    shape = {"num_layers": 16, "hidden_size": 512, "intermediate_size": 512, "max_position_embeddings": 4096}
    tokens = torch.arange(4096, device="cuda")[None] % VOCABULARY
    model: Any = make_decoder("llama", device="cuda", **shape).bfloat16()
    if enable_ckpt:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    plain = peak_of_second(lambda: loss_of(model, tokens).backward())
    del model
    model = make_decoder("llama", device="cuda", **shape).bfloat16()
    handle = enable_activation_offloading(model, "none", enable_ckpt, config=OffloadConfig())
    offloaded = peak_of_second(lambda: loss_of(model, tokens).backward())
    stats = handle.stats
    handle.remove()
    if enable_ckpt:
        assert stats.managed_bytes == 64 * MIB  # of each layer its input, 4096 x 512 in bf16
    assert stats.peak_resident_bytes <= 2 * stats.managed_bytes / 16 * 1.05
    assert offloaded <= plain - 0.8 * (stats.managed_bytes - stats.peak_resident_bytes), (plain, offloaded, stats)


@pytest.mark.usefixtures("deterministic")
def test_a_model_on_the_cpu_of_this_machine() -> None:
    model = make_decoder("llama")
    handle = enable_activation_offloading(model, "none", config=SMALL)
    assert train(model) == train(make_decoder("llama"))
    assert handle.stats.copied_out_bytes > 0
    handle.remove()


# -- several ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_several_ranks(num_ranks: int, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_check_rank, (num_ranks, str(tmp_path / "store")), nprocs=num_ranks)


def _check_rank(rank: int, num_ranks: int, store: str) -> None:
    device = gpu_of(rank)
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl", f"file://{store}", rank=rank, world_size=num_ranks, device_id=device)
    with deterministic_algorithms():
        for strategy, is_mixed in [("fsdp2", False), ("fsdp2", True), ("fsdp", False), ("fsdp", True), ("ddp", False)]:
            _check_strategy(rank, strategy, is_mixed)
    torch.distributed.destroy_process_group()


def _check_strategy(rank: int, strategy: str, is_mixed: bool) -> None:
    def make() -> Any:
        return distribute(make_decoder("qwen2", device="cuda"), strategy, is_mixed)

    plain = run_twice(lambda: train(make(), seed=rank), eq)
    for enable_ckpt in (False, True):
        model = make()
        handle = enable_activation_offloading(model, strategy, enable_ckpt, config=CONFIG)
        assert train(model, seed=rank) == plain, f"{strategy}, mixed precision: {is_mixed}, ckpt: {enable_ckpt}"
        assert handle.stats.num_offloaded_groups >= 3
        handle.remove()
