# SPDX-License-Identifier: Apache-2.0
"""Offload in the log of Megatron-LM's training loop: a stand-in for it, with its functions and their names."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from megatron_patches._training_log import TrainingLog  # noqa: E402
from offload_engine import IterationStats  # noqa: E402
from offload_engine.stats import StepTimes  # noqa: E402

STATS = IterationStats(num_groups=4, managed_bytes=4 << 30, copied_out_bytes=3 << 30, peak_host_bytes=3 << 30)


class Engine:
    """The part of an engine that the log reads."""

    def __init__(self) -> None:
        self.stats, self.times, self.num_asked, self.timer = STATS, StepTimes(800.0, 20.0), 0, self

    def ask(self) -> None:
        self.num_asked += 1


class Writer:
    """A writer of TensorBoard, and a run of W&B."""

    def __init__(self) -> None:
        self.scalars: list[Any] = []

    def add_scalar(self, name: str, value: float, iteration: int) -> None:
        self.scalars.append((name, value, iteration))

    def log(self, values: dict[str, float], iteration: int) -> None:
        self.scalars += [(name, value, iteration) for name, value in values.items()]


SOURCE = """
def training_log(loss_dict, learning_rate, iteration, report_memory_flag, pg_collection=None):
    if iteration % get_args().log_interval == 0:
        print_rank_last(f" iteration {iteration:8d}/ 10 | lm loss: 1.0 |")
    print_rank_last("something else")
    return report_memory_flag

def print_rank_last(message):
    printed.append(message)
"""


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType("megatron.training.training")
    module.printed, module.board, module.wandb = [], Writer(), Writer()
    module.get_args = lambda: SimpleNamespace(log_interval=5)
    module.get_tensorboard_writer, module.get_wandb_writer = lambda: module.board, lambda: module.wandb
    exec(SOURCE, module.__dict__)
    monkeypatch.setitem(sys.modules, "megatron.training", ModuleType("megatron.training"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_the_line_and_both_writers(loop: Any) -> None:
    engine, before = Engine(), (loop.training_log, loop.print_rank_last)
    log = TrainingLog(lambda: engine)  # type: ignore[arg-type, return-value]
    log.attach(None)
    log.attach(None)
    for iteration in range(1, 6):
        assert loop.training_log({}, 0.1, iteration, report_memory_flag=iteration) == iteration
    assert loop.printed[-2].startswith(" iteration        5/ 10 | lm loss: 1.0 | offload moved (GiB): 3 | ")
    assert {message for message in loop.printed if message != loop.printed[-2]} == {"something else"}
    assert loop.board.scalars == loop.wandb.scalars and ("offload/moved_gib", 3.0, 5) in loop.board.scalars
    assert engine.num_asked == 1  # of the step that was logged, and of no other
    log.remove()
    assert (loop.training_log, loop.print_rank_last) == before


def test_a_loop_of_another_shape_is_no_reason_to_end(loop: Any, caplog: pytest.LogCaptureFixture) -> None:
    del loop.print_rank_last
    log = TrainingLog(lambda: None)
    log.attach(None)
    assert "the training log will not show offload figures" in caplog.text
    log.remove()
