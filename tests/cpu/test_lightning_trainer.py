# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer ends with the same losses and weights, to the last bit, with and without the callback."""

from __future__ import annotations

import copy
import csv
import importlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

pytest.importorskip("lightning", reason="pip install -e '.[integrations]' makes this run")

from offload_engine import OffloadConfig  # noqa: E402
from offload_engine.frontends.integrations.lightning import OffloadCallback  # noqa: E402

CONFIG = OffloadConfig(min_tensor_bytes=1, directory="none")
WIDTH, BATCH, NUM_LAYERS, STEPS = 16, 4, 4, 4
INPUTS_BYTES = (NUM_LAYERS - 1) * BATCH * WIDTH * 4
PACKAGES = ["lightning.pytorch", "pytorch_lightning"]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.dropout(nn.functional.gelu(self.linear(self.norm(x))))
        return y


def make_module(package: str, calls_itself: bool = False, fail_at: int | None = None) -> Any:
    """Make a LightningModule whose `training_step` calls its own `forward`, or, as most do, the modules inside it."""
    base: Any = importlib.import_module(package).LightningModule

    class Module(base):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
            self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *self.layers, nn.Linear(WIDTH, 1))
            self.losses: list[float] = []

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.model(batch)
            return y

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            if self.global_step == fail_at:
                raise ArithmeticError("told to fail")
            loss = (self if calls_itself else self.model)(batch).square().mean()
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            self.losses.append(self.model(batch).square().mean().item())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Module()


def batches() -> torch.utils.data.DataLoader[torch.Tensor]:
    samples: Any = list(torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1)))
    return torch.utils.data.DataLoader(samples, batch_size=BATCH)


def fit(
    folder: Path, callbacks: list[Any], module: Any = None, package: str = PACKAGES[0], logger: Any = False
) -> list[torch.Tensor]:
    """Train with gradient accumulation, and validation before, between and after the steps; losses and weights."""
    module = module or make_module(package)
    own = vars(module).get("training_step")
    torch.manual_seed(2)  # dropout
    trainer = importlib.import_module(package).Trainer(
        callbacks=callbacks,
        max_steps=STEPS,
        accumulate_grad_batches=2,
        val_check_interval=4,  # validation after every second step
        limit_val_batches=2,
        num_sanity_val_steps=1,
        log_every_n_steps=1,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=logger,
        default_root_dir=folder,
    )
    try:
        trainer.fit(module, batches(), batches())
    finally:
        assert vars(module).get("training_step") is own
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in module.modules())
    return [torch.tensor(module.losses), *(p.detach().clone() for p in module.parameters())]


def assert_equal(expected: list[torch.Tensor], got: list[torch.Tensor]) -> None:
    assert len(expected[0]) and all(map(torch.equal, expected, got))


@pytest.mark.parametrize("package", PACKAGES)
def test_bitwise_equal(package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    logger = importlib.import_module(f"{package}.loggers").CSVLogger(tmp_path)
    expected = fit(tmp_path, [], package=package)
    callback = OffloadCallback(CONFIG)
    callback.record()
    got = fit(tmp_path, [callback], package=package, logger=logger)
    assert "Saved tensors by module, step 0" in str(callback.report())
    assert len(got[0]) == 1 + 2 * STEPS + 2 * 2  # sanity check, training, validation
    assert_equal(expected, got)
    rows = csv.DictReader((Path(logger.log_dir) / "metrics.csv").open())
    logged = [(float(row["offload_moved_gib"]) * 2**30, float(row["offload_waited_ms"])) for row in rows]
    assert len(logged) == STEPS and min(logged)[0] >= 0.99 * INPUTS_BYTES


@pytest.mark.parametrize("way", ["calls itself", "has a step of its own", "is checkpointed"])
def test_a_module_that(way: str, tmp_path: Path) -> None:
    def make() -> Any:
        module = make_module(PACKAGES[0], calls_itself=way == "calls itself")
        if way == "has a step of its own":
            module.training_step = lambda batch, batch_idx: type(module).training_step(module, batch, batch_idx)
        return module

    moved: list[int] = []

    class Noting(OffloadCallback):
        def on_train_batch_end(self, *args: Any) -> None:
            moved.append(round(self._offload.metrics()["offload_moved_gib"] * 2**30))

    enable_ckpt = way == "is checkpointed"
    assert_equal(fit(tmp_path, [], make()), fit(tmp_path, [Noting(CONFIG, enable_ckpt=enable_ckpt)], make()))
    assert len(moved) == 2 * STEPS and (set(moved) == {INPUTS_BYTES} if enable_ckpt else min(moved) > INPUTS_BYTES)


def test_a_copy_made_in_training_has_weights_and_a_step_of_its_own(tmp_path: Path) -> None:
    copies: list[Any] = []

    class Copying(OffloadCallback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            trainer, pl_module.trainer = pl_module.trainer, None  # as for an average of weights; it cannot be copied
            copies.append(copy.deepcopy(pl_module))
            pl_module.trainer = trainer

    fit(tmp_path, [Copying(CONFIG)])
    last = copies[-1]
    for weight in last.parameters():
        torch.nn.init.zeros_(weight)
    last.trainer = mock.Mock(global_step=0)
    assert last.training_step(torch.ones(BATCH, WIDTH), 0).item() == 0


def test_a_training_that_raises_gives_the_model_back(tmp_path: Path) -> None:
    callback = OffloadCallback(CONFIG)
    with pytest.raises(ArithmeticError):
        fit(tmp_path, [callback], make_module(PACKAGES[0], fail_at=1))
    assert_equal(fit(tmp_path, []), fit(tmp_path, [callback]))
