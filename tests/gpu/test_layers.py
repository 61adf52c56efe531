# SPDX-License-Identifier: Apache-2.0
"""`enable_activation_offloading`, `offload_wrapper` and `checkpoint` on GPUs: the same numbers, less memory."""

from __future__ import annotations

from operator import eq
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_engine import OffloadConfig, enable_activation_offloading, offload_wrapper
from tests.checkpointed import FAMILIES, WAYS, all_equal, make_language_model
from tests.decoders import SMALL, VOCABULARY, distribute, loss_of, make_decoder, train
from tests.gpu.parity import deterministic_algorithms, peak_of_second, run_twice
from tests.gpu.ranks import gpu_of

pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")

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


# -- checkpointed layers -----------------------------------------------------------------------------------------------

LONG, WIDE, DEEP, TOKENS = 4096, 1024, 12, 512
INPUT_BYTES = LONG * WIDE * 2
SIZES = {
    "hidden_size": WIDE,
    "intermediate_size": 2 * WIDE,
    "num_hidden_layers": DEEP,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": TOKENS,
}


def make_long(family: str, way: str | None) -> Any:
    with torch.device("cuda"):
        return make_language_model(family, way, attention_dropout=0.0, **SIZES).bfloat16()


def train_long(model: Any, num_steps: int = 3) -> list[torch.Tensor]:
    """Return losses and all gradients; the GPU is far behind the host all the time."""
    seen: list[torch.Tensor] = []
    for step in range(num_steps):
        tokens = torch.randint(TOKENS, (1, LONG), generator=torch.Generator().manual_seed(step)).cuda()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        model.zero_grad()
    return seen


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_gradient_to_the_last_bit(family: str, way: str) -> None:
    model = offload_wrapper(make_long(family, way))
    found = train_long(model)
    stats = model.activation_offload.stats
    model.activation_offload.remove()
    assert all_equal(found, run_twice(lambda: train_long(make_long(family, way)), all_equal))
    assert stats.copied_out_bytes == DEEP * INPUT_BYTES and stats.peak_resident_bytes <= 2 * INPUT_BYTES
