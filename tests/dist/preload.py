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
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

gc.collect()
gc.freeze()
