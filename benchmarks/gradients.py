# SPDX-License-Identifier: Apache-2.0
"""Digests and samples of gradients: whether two steps agree to the last bit, and by how much they differ if not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

_PIECE = 1 << 22  # elements widened to 64 bits at once: the digest must not make a peak of memory of its own
_SAMPLES = 1 << 12
_MULTIPLIER = 0x9E3779B1  # odd, so that a weighted sum modulo 2**64 notices what moved


@dataclass(frozen=True)
class Fingerprint:
    """Losses and gradients of one step of one rank."""

    losses: list[str]
    """To the last bit, as `float.hex`."""
    digests: dict[str, str]
    samples: dict[str, torch.Tensor]
    """Some elements of each gradient, float32 on the CPU, for the size of a difference."""


@dataclass(frozen=True)
class Difference:
    """How far one step is from another."""

    num_gradients: int
    num_differing: int
    max_relative: float
    """Largest difference of a sampled element, over the largest sampled element of the same gradient."""
    has_equal_losses: bool

    @property
    def is_bitwise_equal(self) -> bool:
        return not self.num_differing and self.has_equal_losses

    def as_record(self) -> dict[str, object]:
        return {**asdict(self), "is_bitwise_equal": self.is_bitwise_equal}


def fingerprint(gradients: Mapping[str, torch.Tensor | None], losses: list[torch.Tensor]) -> Fingerprint:
    """Return the fingerprint of a finished step; wait for the device."""
    present = {name: grad.detach() for name, grad in gradients.items() if grad is not None}
    sums = {name: _sums(grad) for name, grad in present.items()}
    missing = {name: "none" for name in gradients if name not in present}
    digests = {name: "".join(f"{value & (1 << 64) - 1:016x}" for value in pair.tolist()) for name, pair in sums.items()}
    return Fingerprint(
        [float(loss).hex() for loss in losses],
        {**digests, **missing},
        {name: _sample(grad) for name, grad in present.items()},
    )


def compare(one: Fingerprint, other: Fingerprint) -> Difference:
    """Raises:
    ValueError: if the two are not of the same model.
    """
    if one.digests.keys() != other.digests.keys():
        raise ValueError("fingerprints of different models")
    differing = [name for name, digest in one.digests.items() if other.digests[name] != digest]
    largest = max((_relative(one.samples, other.samples, name) for name in differing), default=0.0)
    return Difference(len(one.digests), len(differing), largest, one.losses == other.losses)


def _relative(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], name: str) -> float:
    if name not in one or name not in other:
        return float("inf")
    scale = max(float(one[name].abs().max()), torch.finfo(torch.float32).tiny)
    return float((one[name] - other[name]).abs().max()) / scale


def _sums(grad: torch.Tensor) -> torch.Tensor:
    """Return a plain and a position-weighted sum of the bits, both modulo 2**64 and thus independent of any order."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[grad.element_size()]
    bits = grad.contiguous().view(width).flatten()
    total = torch.zeros(2, dtype=torch.int64, device=grad.device)
    for begin in range(0, bits.numel(), _PIECE):
        piece = bits[begin : begin + _PIECE].to(torch.int64)
        weights = torch.arange(begin, begin + piece.numel(), device=grad.device).mul_(2 * _MULTIPLIER).add_(1)
        total[0] += piece.sum()
        total[1] += weights.mul_(piece).sum()
    return total


def _sample(grad: torch.Tensor) -> torch.Tensor:
    flat = grad.flatten()
    return flat[:: max(1, flat.numel() // _SAMPLES)].float().cpu()
