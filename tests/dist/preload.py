# SPDX-License-Identifier: Apache-2.0
"""Imported once by the server that ranks are forked from."""

import contextlib
import gc
import os
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")

import pytest  # noqa: E402, F401
import torch  # noqa: E402

torch.set_num_threads(1)

import megatron.core.models.gpt.gpt_layer_specs  # noqa: E402, F401

import megatron_patches  # noqa: E402, F401

with contextlib.suppress(ImportError):
    from transformers import Trainer  # noqa: F401

# megatron-core has a few functions of routers compiled: in each rank that takes as long as several steps.
if os.environ.get("OFFLOAD_TESTS_COMPILE_RANKS") != "1":
    torch.compiler.set_stance("force_eager")

gc.collect()
gc.freeze()
