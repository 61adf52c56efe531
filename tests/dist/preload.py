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
import megatron.core.tensor_parallel.random  # noqa: E402

import megatron_patches  # noqa: E402, F401

with contextlib.suppress(ImportError):
    from transformers import Trainer  # noqa: F401

# megatron-core has a few functions of routers compiled: in each rank that takes as long as several steps.
if os.environ.get("OFFLOAD_TESTS_COMPILE_RANKS") != "1":
    torch.compiler.set_stance("force_eager")

# From 0.19 on it compiles and loads a function where layers first recompute: with a lock that all processes wait for.
if load := getattr(megatron.core.tensor_parallel.random, "_get_share_storage", None):
    with contextlib.suppress(Exception):  # without a compiler tests of recomputation fail, and say so
        load()

gc.collect()
gc.freeze()
