# SPDX-License-Identifier: Apache-2.0
"""Tiny GPT models on this rank, and training steps of them, for the tests with process groups."""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank

from megatron_patches import Handle
from megatron_patches._rows.runtime import unwrap
from offload_engine import IterationStats, OffloadConfig, OffloadEngine
from tests.dist.models import delay_weight_gradients, make_model

VOCABULARY, SEQUENCE, HIDDEN, MICRO_BATCH = 64, 16, 32, 2
NUM_LAYERS = 4
ALL = OffloadConfig(min_tensor_bytes=1, directory="none")
"""Offloads whatever is named, to memory."""
T = TypeVar("T")
innermost_hooks = torch._C._autograd._top_saved_tensors_default_hooks
MOE_FREQ = {"dense": None, "moe": 1, "mixed": [0, 1] * (NUM_LAYERS // 2)}


def make_config(kind: str = "dense", dtype: torch.dtype = torch.float32, /, **overrides: Any) -> TransformerConfig:
    """Make a configuration for the parallel state of this process; `kind` is a key of `MOE_FREQ`."""
    virtual = ps.get_virtual_pipeline_model_parallel_world_size()
    settings: dict[str, Any] = {"num_layers": NUM_LAYERS, "hidden_size": HIDDEN, "num_attention_heads": 2}
    settings |= dict.fromkeys(("attention_dropout", "hidden_dropout"), 0.0)
    settings |= dict.fromkeys(("bias_dropout_fusion", "masked_softmax_fusion", "bias_activation_fusion"), False)
    settings |= {"gradient_accumulation_fusion": False, "use_cpu_initialization": True}
    settings |= {"bf16": dtype is torch.bfloat16, "params_dtype": dtype, "pipeline_dtype": dtype}
    settings |= {"overlap_p2p_comm": virtual is not None, "batch_p2p_comm": virtual is None}
    settings |= {"deallocate_pipeline_outputs": True, "virtual_pipeline_model_parallel_size": virtual}
    settings["context_parallel_size"] = ps.get_context_parallel_world_size()
    settings["pipeline_model_parallel_size"] = ps.get_pipeline_model_parallel_world_size()
    if kind != "dense":
        settings.update(
            num_moe_experts=4,
            moe_layer_freq=MOE_FREQ[kind],
            moe_router_topk=2,
            moe_token_dispatcher_type="alltoall",
            moe_ffn_hidden_size=HIDDEN,
            add_bias_linear=False,
            moe_router_load_balancing_type="none",
        )
    settings.update(overrides)
    return (MLATransformerConfig if settings.get("multi_latent_attention") else TransformerConfig)(**settings)


def make_chunks(
    config: TransformerConfig, *, wrap: bool = False, change: Callable[[GPTModel], None] | None = None
) -> list[GPTModel]:
    """Return this rank's model chunks, with the same weights every time."""
    torch.manual_seed(1 + ps.get_pipeline_model_parallel_rank())
    num_stages = ps.get_virtual_pipeline_model_parallel_world_size()
    chunks = [make_chunk(config, stage if num_stages else None) for stage in range(num_stages or 1)]
    if change is not None:
        for chunk in chunks:
            change(chunk)
    return [_wrapped(config, chunk) for chunk in chunks] if wrap else chunks


def _wrapped(config: TransformerConfig, chunk: torch.nn.Module) -> torch.nn.Module:
    """As Megatron's training loop has it: casts around the model, gradients in contiguous buffers around that."""
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(config, settings, Float16Module(config, chunk))


def make_chunk(config: TransformerConfig, stage: int | None) -> GPTModel:
    """One model chunk, of virtual stage `stage`."""
    chunk = make_model(
        config,
        stage,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=False,
    )
    chunk.model_type = ModelType.encoder_or_decoder
    if config.delay_wgrad_compute:
        delay_weight_gradients(chunk)
    return chunk.to(config.params_dtype)


def run(
    chunks: list[torch.nn.Module],
    num_microbatches: int,
    *,
    forward_only: bool = False,
    schedule: Callable[..., Any] | None = None,
    make_batches: Callable[[int], Iterator[torch.Tensor]] | None = None,
    **more: Any,
) -> list[float]:
    """Run one step of `schedule`, else of that which the parallel state asks for; return this rank's losses."""
    has_stages = ps.get_virtual_pipeline_model_parallel_world_size() is not None
    batches = [(make_batches or _batches)(num_microbatches) for _ in chunks]
    for chunk in chunks:
        chunk.train(not forward_only)
        getattr(chunk, "zero_grad_buffer", chunk.zero_grad)()
    with torch.set_grad_enabled(not forward_only):
        out = (schedule or get_forward_backward_func())(
            forward_step_func=more.pop("forward_step", forward_step),
            data_iterator=batches if has_stages else batches[0],
            model=chunks if has_stages else chunks[0],
            num_microbatches=num_microbatches,
            forward_only=forward_only,
            **{"seq_length": SEQUENCE, "micro_batch_size": MICRO_BATCH, **more},
        )
    return [entry["loss"].item() for entry in out]


def step(chunks: list[torch.nn.Module], num_microbatches: int, **more: Any) -> dict[str, str]:
    """Run one step; return its fingerprint."""
    return fingerprint(chunks, run(chunks, num_microbatches, **more))


def engine_of(handle: Handle) -> OffloadEngine:
    """Return the engine, which a step has made."""
    assert handle.engine is not None
    return handle.engine


def decoder_of(chunk: torch.nn.Module) -> Any:
    """Return the decoder of a model chunk, wrapped or not."""
    return unwrap(chunk).decoder


def messages() -> list[str]:
    """Get every message of `megatron_patches` from now on, until the process ends: pytest sees none of a rank's."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_patches").addHandler(handler)
    return records


def num_hooks(chunks: list[torch.nn.Module]) -> int:
    """Count the hooks around forwards."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for chunk in chunks for m in chunk.modules())


def stats_of(handle: Handle) -> IterationStats:
    """Return the counters of the last step."""
    assert handle.stats is not None
    return handle.stats


def fingerprint(chunks: list[torch.nn.Module], losses: list[float]) -> dict[str, str]:
    """Return a digest of the losses and of every gradient, to the last bit."""
    named = {f"{stage}.{name}": p for stage, chunk in enumerate(chunks) for name, p in chunk.named_parameters()}
    digests = {name: _digest(getattr(p, "main_grad", p.grad)) for name, p in named.items()}
    return {**digests, "losses": repr([loss.hex() for loss in losses])}


def forward_step(batches: Iterator[torch.Tensor], model: Any, return_schedule_plan: bool = False) -> Any:
    """What Megatron calls for each microbatch; under the all-to-all overlap it asks for a plan instead of an output."""
    tokens = next(batches)
    positions = torch.arange(SEQUENCE)[None].expand(tokens.shape[0], -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
    forward = model.build_schedule_plan if return_schedule_plan else model
    batch = of_this_rank(tokens=tokens, positions=positions, attention_mask=mask, labels=tokens.roll(-1, dims=1))
    output = forward(batch["tokens"], batch["positions"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(mean_loss)


def of_this_rank(**batch: torch.Tensor | None) -> dict[str, Any]:
    """Its part of the sequence, under context parallelism."""
    has_kinds = "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters  # from 0.18 on
    options = {"is_hybrid_cp": False} if has_kinds else {}
    return get_batch_on_this_cp_rank(batch, cp_group=ps.get_context_parallel_group(), **options)


def mean_loss(output: torch.Tensor) -> Any:
    """Return the loss as the schedules want it."""
    loss = output.float().mean()
    return loss, {"loss": loss.detach()}


def _batches(num_microbatches: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(7 + num_microbatches)
    for _ in range(num_microbatches):
        yield torch.randint(0, VOCABULARY, (MICRO_BATCH, SEQUENCE), generator=generator)


def gathered(value: Any) -> list[Any]:
    """Return the value of each rank."""
    found = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value)
    return found


def check_bits(expected: dict[str, str], got: dict[str, str], *where: object) -> None:
    """Compare two fingerprints; fail with the names of what differs."""
    wrong = [key for key in expected if got[key] != expected[key]]
    assert not wrong, f"differs from the step without offload: {where}, {wrong[:5]}"


def _digest(grad: torch.Tensor | None) -> str:
    if grad is None:
        return "none"
    return hashlib.sha1(grad.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


# -- the distributed optimizer: gradients are reduced during the backward, parameters gathered behind ------------------

_OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "use_distributed_optimizer": True}


def train_distributed(
    config: Any, chunks: Sequence[torch.nn.Module], step: Callable[[list[Any]], T], num_steps: int = 3
) -> list[T]:
    """Run some steps of a model in bf16; return what each `step` of the wrapped chunks has returned."""
    wrapped = _wrap_distributed(config, chunks)
    types = {"bf16": True, "params_dtype": torch.bfloat16}
    shared = {"use_distributed_optimizer": True, "overlap_param_gather": True}
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.01, **types, **shared), wrapped)
    config.grad_scale_func = optimizer.scale_loss
    steps = []
    for _ in range(num_steps):
        steps.append(step(wrapped))
        assert optimizer.step()[0]
    return steps


def _wrap_distributed(config: Any, chunks: Sequence[torch.nn.Module]) -> list[Any]:
    overlap = {**_OVERLAP, "delay_wgrad_compute": True} if config.delay_wgrad_compute else _OVERLAP
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, bucket_size=2000, **overlap)
    wrapped = [DistributedDataParallel(config, settings, Float16Module(config, chunk)) for chunk in chunks]
    config.finalize_model_grads_func = finalize_model_grads
    names = {"no_sync": "no_sync", "grad_sync": "start_grad_sync", "param_sync": "start_param_sync"}
    for name, function in names.items():
        functions = [getattr(chunk, function) for chunk in wrapped]
        setattr(config, f"{name}_func", functions if len(functions) > 1 else functions[0])
    return wrapped
