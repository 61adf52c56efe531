# SPDX-License-Identifier: Apache-2.0
"""Small Hugging Face decoders with random weights, distributed in every way, and steps of training them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from offload_engine import OffloadConfig

VOCABULARY, LENGTH, HIDDEN = 96, 24, 32
# The tensors of these models are small; statistics of the norms (LENGTH floats) stay.
SMALL = OffloadConfig(min_tensor_bytes=1024, directory="none")


class Trace(NamedTuple):
    """What training gave, to be compared to the last bit."""

    losses: list[torch.Tensor]
    gradients: list[dict[str, torch.Tensor]]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Trace)
        return _equal(self.losses, other.losses) and all(
            mine.keys() == theirs.keys() and _equal(mine.values(), theirs.values())
            for mine, theirs in zip(self.gradients, other.gradients, strict=True)
        )


def _equal(mine: Any, theirs: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def make_decoder(kind: str, num_layers: int = 4, device: str | None = None, **settings: Any) -> nn.Module:
    """Make a "qwen2" (biases in attention, tied embedding) or a "llama", with the same weights each time.

    Args:
        kind: see above.
        num_layers: of the decoder.
        device: None: the default one.
        settings: of its configuration.
    """
    torch.manual_seed(7)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_dropout": 0.1,
        **settings,
    }
    with torch.device(device) if device is not None else nullcontext():
        if kind == "qwen2":
            from transformers import Qwen2Config, Qwen2ForCausalLM

            return Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=True, **sizes)).train()
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=False, **sizes)).train()


def distribute(model: nn.Module, strategy: str, is_mixed: bool = False) -> nn.Module:
    """`model` under "fsdp", "fsdp2", "ddp" or "none", on its device; mixed: computed in bf16."""
    device = next(model.parameters()).device
    layers = list(model.model.layers)  # type: ignore[union-attr, arg-type]
    low = torch.bfloat16 if is_mixed else None
    if strategy == "fsdp":
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({type(layers[0])}),
            device_id=device,
            use_orig_params=True,
            mixed_precision=MixedPrecision(param_dtype=low),
        )
    if strategy == "fsdp2":
        mesh = torch.distributed.init_device_mesh(device.type, (torch.distributed.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=low)
        for module in (*layers, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        return model
    return nn.parallel.DistributedDataParallel(model) if strategy == "ddp" else model


def train(model: nn.Module, num_steps: int = 3, num_microbatches: int = 2, seed: int = 0) -> Trace:
    """Run steps of gradient accumulation with evaluation in between, dropout on."""
    device = next(model.parameters()).device
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = Trace([], [])
    for step in range(num_steps):
        for microbatch in range(num_microbatches):
            torch.manual_seed(1000 * seed + 10 * step + microbatch)
            loss = loss_of(model, torch.randint(VOCABULARY, (2, LENGTH)).to(device))
            loss.backward()
            trace.losses.append(loss.detach())
        trace.gradients.append(dict(gradients(model)))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            trace.losses.append(loss_of(model.eval(), torch.arange(LENGTH, device=device)[None]).detach())
        model.train()
    return trace


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the loss of predicting `tokens`."""
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A copy of each gradient, this rank's part of it."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient: Any = parameter.grad
            yield name, (gradient.to_local() if hasattr(gradient, "to_local") else gradient).clone()


class CountAllGathers(TorchDispatchMode):
    """Counts the all-gathers of whole parameters issued inside it, in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.num_all_gathers = 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_all_gathers += "allgather" in str(func).replace("_", "")
        return func(*args, **(kwargs or {}))


class SavesDetached(torch.autograd.Function):
    """A linear layer that saves an alias of its weight which has forgotten that it is one, as custom kernels do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight.detach())
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].flatten(0, -2).t() @ x.flatten(0, -2)
