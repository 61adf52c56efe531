# SPDX-License-Identifier: Apache-2.0
"""What is checked after the first step is checked after the first that does not raise."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch  # noqa: E402

from megatron_patches import apply  # noqa: E402
from offload_engine import OffloadConfig  # noqa: E402
from tests.dist.launch import Pipeline, run_ranks  # noqa: E402
from tests.dist.tiny import make_chunks, make_config, run  # noqa: E402

SMALL = {"offload_activation": True, "offload_modules": ["core_attn"], "offload_host_limit_bytes": 4096}


@pytest.mark.parametrize(("shape", "ranks"), [(Pipeline(), (0,)), (Pipeline(2), (0, 1)), (Pipeline(2), (0,))], ids=str)
def test_the_host_limit_is_checked_where_the_first_step_is_repeated(shape: Pipeline, ranks: tuple[int, ...]) -> None:
    run_ranks(_check_repeated, ranks, pipeline=shape, timeout_s=60.0)


def _check_repeated(ranks: tuple[int, ...]) -> None:
    """The ranks that are not among `ranks` offload nothing."""
    with apply(OffloadConfig(min_tensor_bytes=1)) as handle:
        does_offload = torch.distributed.get_rank() in ranks
        chunks = make_chunks(make_config(**(SMALL if does_offload else {})))
        config: Any = chunks[0].config
        config.finalize_model_grads_func = _fail  # on all ranks, which have sent and received everything
        with pytest.raises(ArithmeticError):
            run(chunks, 2)
        config.finalize_model_grads_func = None
        assert (handle.engine is not None) == does_offload
        for _ in range(2):  # a refused model is checked again
            with pytest.raises(ValueError, match="offload_host_limit_bytes=4,096 has no room for any of"):
                run(chunks, 2)
            assert handle.engine is None
        config.offload_host_limit_bytes = None
        for _ in range(3):
            run(chunks, 2)


def _fail(*args: Any, **kwargs: Any) -> Any:
    raise ArithmeticError("in the first step")
