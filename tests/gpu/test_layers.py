"""`enable_activation_offloading` on one GPU: the same numbers, less memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")

from offload_engine import OffloadConfig, enable_activation_offloading  # noqa: E402
from tests.decoders import SMALL, VOCABULARY, distribute, loss_of, make_decoder, train  # noqa: E402

CONFIG = SMALL.replace(directory=None)


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Embeddings add their gradients with atomics otherwise."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("own", [None, "plain", "reentrant"])
@pytest.mark.parametrize("enable_ckpt", [False, True])
def test_losses_and_gradients_are_equal_to_the_last_bit(kind: str, own: str | None, enable_ckpt: bool) -> None:
    model: Any = make_decoder(kind, device="cuda")
    if own is not None:
        model.gradient_checkpointing_enable({"use_reentrant": own == "reentrant"})
    handle = enable_activation_offloading(model, "none", enable_ckpt, config=CONFIG)
    assert train(model) == train(make_decoder(kind, device="cuda"))
    assert handle.stats.num_offloaded_groups >= 3 and handle.stats.num_storages_left == 0
    handle.remove()


def test_autocast() -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        plain = train(make_decoder("llama", device="cuda"))
        model = make_decoder("llama", device="cuda")
        handle = enable_activation_offloading(model, "none", config=CONFIG)
        assert train(model) == plain
    handle.remove()


@pytest.mark.parametrize("enable_ckpt", [False, True])
def test_memory_goes_down(enable_ckpt: bool) -> None:
    """Two layers of eight and what lies outside them, instead of all eight."""
    shape = {"num_layers": 8, "hidden_size": 512, "intermediate_size": 1024, "max_position_embeddings": 4096}
    tokens = torch.arange(4096, device="cuda")[None] % VOCABULARY
    peaks = []
    for offload in (False, True):
        model: Any = make_decoder("llama", device="cuda", **shape).bfloat16()
        if enable_ckpt and not offload:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        handle = enable_activation_offloading(model, "none", enable_ckpt, config=OffloadConfig()) if offload else None
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            loss_of(model, tokens).backward()
            peaks.append(torch.cuda.max_memory_allocated() - before)
            model.zero_grad()
        if handle is not None:
            stats = handle.stats
            assert stats.peak_resident_bytes <= 2 * stats.managed_bytes / 8 * 1.05
            saved = stats.managed_bytes - stats.peak_resident_bytes
            assert peaks[-1] <= peaks[1] - 0.8 * saved, (peaks, stats)
            handle.remove()
        del model


def test_a_model_on_the_cpu_of_this_machine() -> None:
    model = make_decoder("llama")
    handle = enable_activation_offloading(model, "none", config=SMALL)
    assert train(model) == train(make_decoder("llama"))
    assert handle.stats.copied_out_bytes > 0
    handle.remove()


# -- several GPUs -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason=f"needs 2 GPUs of one machine to shard over with NCCL, there are {torch.cuda.device_count()}",
)
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp", "ddp"])
def test_several_gpus(strategy: str, tmp_path: Path) -> None:
    world_size = torch.cuda.device_count()
    torch.multiprocessing.spawn(_check_rank, (world_size, str(tmp_path / "store"), strategy), nprocs=world_size)


def _check_rank(rank: int, world_size: int, store: str, strategy: str) -> None:
    torch.cuda.set_device(rank)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.distributed.init_process_group("nccl", f"file://{store}", rank=rank, world_size=world_size)
    for is_mixed in (False, True) if strategy != "ddp" else (False,):
        plain = train(distribute(make_decoder("qwen2", device="cuda"), strategy, is_mixed), seed=rank)
        for enable_ckpt in (False, True):
            model = distribute(make_decoder("qwen2", device="cuda"), strategy, is_mixed)
            handle = enable_activation_offloading(model, strategy, enable_ckpt, config=CONFIG)
            assert train(model, seed=rank) == plain
            assert handle.stats.num_offloaded_groups >= 3
            handle.remove()
    torch.distributed.destroy_process_group()
