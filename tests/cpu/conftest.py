"""Fixtures of the tests without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.adversarial import AdversarialDevice


@pytest.fixture
def device() -> Iterator[AdversarialDevice]:
    """A device on which a missing wait is a hazard; the test fails if there was one."""
    device = AdversarialDevice()
    yield device
    assert not device.hazards
