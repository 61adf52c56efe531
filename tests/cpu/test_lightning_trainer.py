# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer ends with the same losses and weights, to the last bit, with and without the callback."""

from __future__ import annotations

import copy
import csv
import importlib
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn

pytest.importorskip("lightning", reason="pip install -e '.[integrations]' makes this run")

from offload_engine import OffloadConfig  # noqa: E402
from offload_engine.frontends.integrations.lightning import OffloadCallback  # noqa: E402

CONFIG = OffloadConfig(min_tensor_bytes=1, directory="none")
WIDTH, BATCH, NUM_LAYERS, STEPS = 16, 4, 4, 4
PACKAGES = ["lightning.pytorch", "pytorch_lightning"]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.dropout(nn.functional.gelu(self.linear(self.norm(x))))
        return y


class Recording(OffloadCallback):
    """Notes the bytes that left in each batch."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(CONFIG, **settings)
        self.moved: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.moved.append(self._offload.metrics()["offload_moved_gib"])


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
    samples = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(list(samples), batch_size=BATCH)


def make_trainer(package: str, folder: Path, callbacks: list[Any], **settings: Any) -> Any:
    defaults: dict[str, Any] = dict(
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
        logger=False,
        default_root_dir=folder,
    )
    return importlib.import_module(package).Trainer(callbacks=callbacks, **{**defaults, **settings})


class Trained(NamedTuple):
    losses: list[float]
    weights: list[torch.Tensor]


def fit(
    package: str,
    folder: Path,
    callbacks: list[Any],
    resume: Path | None = None,
    calls_itself: bool = False,
    **settings: Any,
) -> Trained:
    module = make_module(package, calls_itself)
    trainer = make_trainer(package, folder, callbacks, **settings)
    torch.manual_seed(2)  # dropout
    trainer.fit(module, batches(), batches(), ckpt_path=resume)
    assert "training_step" not in vars(module)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in module.modules())
    return Trained(module.losses, [p.detach().clone() for p in module.parameters()])


def assert_equal(expected: Trained, got: Trained) -> None:
    assert expected.losses and expected.losses == got.losses
    assert all(map(torch.equal, expected.weights, got.weights))


@pytest.mark.parametrize("package", PACKAGES)
def test_bitwise_equal(package: str, tmp_path: Path) -> None:
    """With gradient accumulation, and validation before, between and after the steps."""
    pytest.importorskip(package)
    logger = importlib.import_module(f"{package}.loggers").CSVLogger(tmp_path)
    expected = fit(package, tmp_path, [])
    callback = OffloadCallback(CONFIG)
    callback.record()
    got = fit(package, tmp_path, [callback], logger=logger)
    assert "Saved tensors by module, step 0" in str(callback.report())
    assert len(got.losses) == 1 + 2 * STEPS + 2 * 2  # sanity check, training, validation
    assert_equal(expected, got)
    rows = csv.DictReader((Path(logger.log_dir) / "metrics.csv").open())
    logged = [(float(row["offload_moved_gib"]) * 2**30, float(row["offload_waited_ms"])) for row in rows]
    assert len(logged) == STEPS and min(logged)[0] >= 0.99 * (NUM_LAYERS - 1) * BATCH * WIDTH * 4


def test_a_module_that_is_called(tmp_path: Path) -> None:
    expected, callback = fit(PACKAGES[0], tmp_path, [], calls_itself=True), Recording()
    assert_equal(expected, fit(PACKAGES[0], tmp_path, [callback], calls_itself=True))
    other = Recording()
    fit(PACKAGES[0], tmp_path, [other])
    assert callback.moved == other.moved


def test_checkpointing_by_the_callback(tmp_path: Path) -> None:
    expected, callback = fit(PACKAGES[0], tmp_path, []), Recording(enable_ckpt=True)
    assert_equal(expected, fit(PACKAGES[0], tmp_path, [callback]))
    moved = [round(gib * 2**30) for gib in callback.moved]
    assert moved == 2 * STEPS * [(NUM_LAYERS - 1) * BATCH * WIDTH * 4]


def test_resume(tmp_path: Path) -> None:
    """Two steps without offload, then two more from the checkpoint with it; the random numbers begin anew."""
    package = PACKAGES[0]
    trainer = make_trainer(package, tmp_path, [], max_steps=2)
    trainer.fit(make_module(package), batches())
    path = tmp_path / "two_steps.ckpt"
    trainer.save_checkpoint(path)
    expected, callback = fit(package, tmp_path, [], path), Recording()
    assert_equal(expected, fit(package, tmp_path, [callback], path))
    assert len(callback.moved) == 2 * (STEPS - 2) and min(callback.moved) > 0


def test_a_training_step_of_the_instance_stays_its_own(tmp_path: Path) -> None:
    module = make_module(PACKAGES[0])

    def own(batch: Any, batch_idx: int) -> Any:
        return type(module).training_step(module, batch, batch_idx)

    module.training_step = own
    callback = Recording()
    make_trainer(PACKAGES[0], tmp_path, [callback]).fit(module, batches(), batches())
    assert module.training_step is own and min(callback.moved) > 0


def test_a_copy_made_in_training_has_weights_and_a_step_of_its_own(tmp_path: Path) -> None:
    copies: list[Any] = []

    class Copying(OffloadCallback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            trainer, pl_module.trainer = pl_module.trainer, None  # as for an average of weights; it cannot be copied
            copies.append(copy.deepcopy(pl_module))
            pl_module.trainer = trainer

    make_trainer(PACKAGES[0], tmp_path, [Copying(CONFIG)]).fit(make_module(PACKAGES[0]), batches(), batches())
    last = copies[-1]
    for weight in last.parameters():
        torch.nn.init.zeros_(weight)
    last.trainer = mock.Mock(global_step=0)
    assert last.training_step(torch.ones(BATCH, WIDTH), 0).item() == 0


def test_a_training_that_raises_gives_the_model_back(tmp_path: Path) -> None:
    callback = OffloadCallback(CONFIG)
    module = make_module(PACKAGES[0], fail_at=1)
    with pytest.raises(ArithmeticError):
        make_trainer(PACKAGES[0], tmp_path, [callback]).fit(module, batches(), batches())
    assert "training_step" not in vars(module)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in module.modules())
    assert_equal(fit(PACKAGES[0], tmp_path, []), fit(PACKAGES[0], tmp_path, [callback]))
