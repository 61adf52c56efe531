# SPDX-License-Identifier: Apache-2.0
"""What tells in all benchmarks whether gradients are equal to the last bit."""

from __future__ import annotations

import torch

from benchmarks import gradients


def test_fingerprints_notice_one_bit_and_the_order() -> None:
    grad = torch.randn(1000).bfloat16()
    flipped, swapped = grad.clone(), grad.clone()
    flipped.view(torch.int16)[500] ^= 1
    swapped[[0, 1]] = grad[[1, 0]]
    tensors = grad, grad.clone(), flipped, swapped
    own, same, *others = (gradients.fingerprint({"w": one, "b": None}, [torch.tensor(1.5)]) for one in tensors)
    assert gradients.compare(own, same) == gradients.Difference(2, 0, 0.0, True)
    for other in others:
        difference = gradients.compare(own, other)
        assert difference.num_differing == 1 and difference.max_relative > 0 and not difference.is_bitwise_equal
