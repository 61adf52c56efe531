# SPDX-License-Identifier: Apache-2.0
"""Process groups, the GPT model, and one training step of it (without optimizer)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .settings import Shape

SEED = 1


class Ranks(NamedTuple):
    """Where this process stands. Records travel over gloo: NCCL would need device memory for them."""

    rank: int
    world_size: int
    records: Any

    def gather(self, value: Any) -> list[Any]:
        """Gather the value of every rank, on every rank."""
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=self.records)
        return found

    def barrier(self) -> None:
        dist.barrier(group=self.records)


def start_ranks(shape: Shape) -> Ranks:
    """Join the processes of torchrun (or stand alone) and set up megatron-core's parallel state."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    rank = int(os.environ["LOCAL_RANK"])
    if rank >= torch.cuda.device_count():
        raise SystemExit(f"process {rank} has no GPU, there are {torch.cuda.device_count()}")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    parallel_state.initialize_model_parallel(
        1, shape.pp, virtual_pipeline_model_parallel_size=shape.vpp or None, expert_model_parallel_size=shape.ep
    )
    torch.manual_seed(SEED)
    model_parallel_cuda_manual_seed(SEED)
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo"))


def make_config(shape: Shape, **more: Any) -> Any:
    """Make the TransformerConfig, with every kind of offload and of recomputation off; `more` are fields of it."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    if shape.experts:
        more |= {"num_moe_experts": shape.experts, "moe_router_topk": shape.topk, "moe_grouped_gemm": True}
        more |= {"moe_token_dispatcher_type": "alltoall", "moe_ffn_hidden_size": shape.moeffn or shape.ffn}
        more |= {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2}
    config_class = MLATransformerConfig if more.get("multi_latent_attention") else TransformerConfig
    config = config_class(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        ffn_hidden_size=shape.ffn or 4 * shape.hidden,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        pipeline_model_parallel_size=shape.pp,
        virtual_pipeline_model_parallel_size=shape.vpp or None,
        expert_model_parallel_size=shape.ep,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=True,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        deallocate_pipeline_outputs=True,
        batch_p2p_comm=not shape.vpp,
        overlap_p2p_comm=bool(shape.vpp),
        **more,
    )
    config.autocast_dtype = torch.bfloat16
    return config


def build_chunks(shape: Shape, config: Any) -> list[torch.nn.Module]:
    """Build this rank's model chunks, one for each virtual stage."""
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    kinds = dict(
        num_experts=shape.experts or None,
        moe_grouped_gemm=bool(shape.experts),
        multi_latent_attention=config.multi_latent_attention,
    )
    chunks = []
    for stage in range(shape.vpp) if shape.vpp else [None]:
        chunk = GPTModel(
            config,
            get_gpt_layer_with_transformer_engine_spec(**kinds),
            shape.vocab,
            shape.seq,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            vp_stage=stage,
        )
        chunk.model_type = ModelType.encoder_or_decoder
        chunks.append(chunk.cuda().bfloat16())
    return chunks


class Training:
    """Owns the chunks and one batch. With `keeps_gradients` the caller zeroes them in place."""

    def __init__(
        self, shape: Shape, chunks: Sequence[Any], device: torch.device | str = "cuda", keeps_gradients: bool = False
    ) -> None:
        from megatron.core import parallel_state

        self._keeps_gradients = keeps_gradients
        self._shape = shape
        self._chunks = list(chunks)
        self._parameters = [p for chunk in chunks for p in chunk.parameters()]
        # The same tokens on every stage of a pipeline: its first reads them, its last has them as labels.
        generator = torch.Generator().manual_seed(SEED + parallel_state.get_data_parallel_rank())
        tokens = torch.randint(0, shape.vocab, (shape.mbs, shape.seq), generator=generator)
        self._tokens = tokens.to(device)
        # A budget is decided when an optimizer has its state. The benchmark trains nothing: this one has none.
        self._optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
        self._positions = torch.arange(shape.seq, device=device)[None].expand(shape.mbs, -1)

    def step(self) -> list[torch.Tensor]:
        """Run a step with fresh gradients; return the losses of the microbatches (only on the last stage)."""
        from megatron.core.pipeline_parallel import get_forward_backward_func  # a contender may have replaced it

        self.release()
        has_stages = bool(self._shape.vpp)
        results = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=[iter(()) for _ in self._chunks] if has_stages else iter(()),
            model=self._chunks if has_stages else self._chunks[0],
            num_microbatches=self._shape.nmb,
            seq_length=self._shape.seq,
            micro_batch_size=self._shape.mbs,
            forward_only=False,
        )
        self._optimizer.step()
        return [result["loss"] for result in results or ()]

    def release(self) -> None:
        """Drop what a step leaves: its blocks would keep whole segments of a contender from being returned."""
        for parameter in () if self._keeps_gradients else self._parameters:
            parameter.grad = None
        for chunk in () if self._keeps_gradients else self._chunks:
            chunk.set_input_tensor([None])

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Return the gradients of the last step by name."""
        return {
            f"{stage}.{name}": parameter.grad
            for stage, chunk in enumerate(self._chunks)
            for name, parameter in chunk.named_parameters()
        }

    def _forward(self, batches: Any, model: Any, *_: Any, return_schedule_plan: bool = False) -> Any:
        forward = model.build_schedule_plan if return_schedule_plan else model  # with the overlap, the plan of a chunk
        return forward(self._tokens, self._positions, None, labels=self._tokens), _loss


def _loss(output: torch.Tensor) -> Any:
    loss = output.float().mean()
    return loss, {"loss": loss.detach()}
