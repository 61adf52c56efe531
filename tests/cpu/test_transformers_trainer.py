# SPDX-License-Identifier: Apache-2.0
"""The Trainer of transformers ends with the same losses and weights, to the last bit, with and without the callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="pip install -e '.[integrations]' makes this run")
pytest.importorskip("accelerate", reason="pip install -e '.[integrations]' makes this run")

from offload_engine import OffloadConfig  # noqa: E402
from offload_engine.frontends.integrations.transformers import OffloadCallback  # noqa: E402
from tests.checkpointed import DEPTH, INPUT_BYTES, make_language_model, random_tokens  # noqa: E402

TrainerCallback: Any = transformers.TrainerCallback
CONFIG = OffloadConfig(min_tensor_bytes=1, directory="none")
STEPS, ACCUMULATION = 3, 2


class Tokens(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = random_tokens(index)[0]
        return {"input_ids": tokens, "labels": tokens}


class Trained(NamedTuple):
    losses: list[float]
    weights: list[torch.Tensor]
    logs: list[dict[str, Any]]


def train(model: Any, folder: Path, callbacks: list[Any], **arguments: Any) -> Trained:
    settings: dict[str, Any] = {"output_dir": str(folder), "max_steps": STEPS, "learning_rate": 1e-2}
    settings |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": ACCUMULATION}
    settings |= {"logging_steps": 1, "eval_strategy": "steps", "eval_steps": 1}  # evaluation after every step
    settings |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    settings |= {"use_cpu": True, "dataloader_pin_memory": False}
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(**{**settings, **arguments}),
        train_dataset=Tokens(),
        eval_dataset=torch.utils.data.Subset(Tokens(), range(4)),
        callbacks=callbacks,
    )
    trainer.train()
    logs = trainer.state.log_history
    losses = [log[name] for log in logs for name in ("loss", "eval_loss") if name in log]
    return Trained(losses, [p.detach().clone() for p in model.parameters()], logs)


def assert_equal(expected: Trained, got: Trained) -> None:
    assert len(expected.losses) == 2 * STEPS and expected.losses == got.losses
    assert all(map(torch.equal, expected.weights, got.weights))


@pytest.mark.parametrize(
    ("family", "arguments", "enable_ckpt"),
    [
        ("qwen2", {}, False),
        ("llama", {"gradient_checkpointing": True}, False),
        ("llama", {"bf16": True}, False),
        ("qwen2", {}, True),
    ],
    ids=["plain", "checkpointed", "half precision", "checkpointed by the callback"],
)
def test_bitwise_equal(family: str, arguments: dict[str, Any], enable_ckpt: bool, tmp_path: Path) -> None:
    without = {"gradient_checkpointing": True} if enable_ckpt else arguments
    expected = train(make_language_model(family), tmp_path, [], **without)
    callback, reporter, last = OffloadCallback(CONFIG, enable_ckpt=enable_ckpt), Reporter(), Reporter()
    callback.record(tmp_path / "step.json")
    got = train(make_language_model(family), tmp_path, [reporter, callback, last], **arguments)
    assert_equal(expected, got)
    assert "model.layers.*" in str(callback.report()) and (tmp_path / "step.json").exists()
    assert got.losses[0] != got.losses[2]  # it has learned something in between
    steps = [log for log in got.logs if "loss" in log]
    assert all(log["offload_moved_gib"] > 0 for log in steps)
    if enable_ckpt:  # only the inputs of layers leave
        moved = (DEPTH - 1) * INPUT_BYTES
        assert steps[0]["offload_moved_gib"] * 2**30 == pytest.approx(moved, rel=1e-3)
    evaluations = [log for log in got.logs if "eval_loss" in log]
    assert evaluations and not any(key.startswith("offload_") for log in evaluations for key in log)
    summary = next(log for log in got.logs if "train_runtime" in log)  # also if no step was logged
    assert summary["offload_moved_gib"] > 0 and summary["offload_waited_ms"] >= 0
    assert reporter.sent == last.sent, "one in front gets the figures, too"
    assert all(logs["offload_moved_percent"] > 0 for logs in reporter.sent if "loss" in logs)


class Reporter(TrainerCallback):
    """Notes what a reporter such as that of W&B would send."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def on_log(self, *args: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        self.sent.append(dict(logs))
