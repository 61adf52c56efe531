# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests without a GPU."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch

from offload_engine._compat import torch_private
from tests.adversarial import AdversarialDevice


@pytest.fixture
def device() -> Iterator[AdversarialDevice]:
    """A device on which a missing wait is a hazard; the test fails if there was one."""
    device = AdversarialDevice()
    yield device
    assert not device.hazards


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread: sums keep their order, and several only hinder each other on small tensors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def interrupts_raise() -> Iterator[None]:
    """Have SIGINT raise, also in a process that was started in the background, where shells have it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def no_hooks() -> Iterator[None]:
    """Find no hooks on autograd's stack, and leave none to later tests."""
    assert torch_private.innermost_hooks(True) is None
    yield
    while torch_private.innermost_hooks(True) is not None:
        torch_private.pop_hooks()
