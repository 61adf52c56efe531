# SPDX-License-Identifier: Apache-2.0
"""What megatron_patches knows of tensors that a schedule holds: who may read them later, and what a failure ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_patches._hooks.attach import Attachment
from megatron_patches._hooks.held import HeldTensors, is_input_of_others


@pytest.mark.parametrize(
    ("config", "args", "kwargs", "is_others"),
    [
        ({}, (), {}, False),
        ({}, (), {"output_processor": None, "decoder_input": None}, False),
        ({}, (), {"output_processor": lambda *_: None}, True),
        ({}, (), {"decoder_input": torch.ones(1)}, True),
        ({}, (None, None, None, torch.ones(1)), {}, True),
        ({"config_logger_dir": "/tmp"}, (), {}, True),
    ],
)
def test_who_may_read_the_input_of_a_decoder_later(
    config: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any], is_others: bool
) -> None:
    chunk: Any = SimpleNamespace(config=SimpleNamespace(**config))
    assert is_input_of_others(chunk, args, kwargs) == is_others


def test_an_abandoned_step_lets_go_of_what_was_held() -> None:
    attachment: Any = object.__new__(Attachment)
    attachment.held = HeldTensors(mock.Mock())
    attachment.held._input = [torch.ones(1)]
    attachment.recomputed = mock.Mock()
    attachment._pause, attachment.nodes, attachment._brackets = mock.Mock(), mock.Mock(), []
    with mock.patch.object(Attachment, "_leave_called"):
        attachment.reset()
    assert not attachment.held._input
