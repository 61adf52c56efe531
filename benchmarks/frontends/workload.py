# SPDX-License-Identifier: Apache-2.0
"""The model and its training step (without optimizer), on a CUDA device or the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from .settings import Shape

SEED = 1


@dataclass(frozen=True)
class Attached:
    """A contender that is on the model."""

    around_step: Callable[[], AbstractContextManager[Any]] = nullcontext
    around_forward: Callable[[], AbstractContextManager[Any]] = nullcontext
    stats: Callable[[], Any] = lambda: None
    """The engine's `IterationStats` of the last step; None for the others."""
    engine: Any = None


class Workload:
    """One model and one sequence; every contender works on these."""

    def __init__(self, shape: Shape, device: str, documents: int | None = None) -> None:
        """Build the model with random weights; if given, attention stays within documents of so many tokens."""
        from transformers import Qwen2Config, Qwen2Model

        self.shape = shape
        self.device = torch.device(device)
        config = Qwen2Config(
            vocab_size=shape.vocab,
            hidden_size=shape.hidden,
            intermediate_size=shape.ffn,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=1 << 20,
            use_cache=False,
            attn_implementation="sdpa" if documents is None else _register_attention(documents),
        )
        torch.manual_seed(SEED)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16 if self.is_cuda else torch.float32)
        try:
            with self.device:
                self.model: Any = Qwen2Model(config)
        finally:
            torch.set_default_dtype(default)
        self.model.train()
        self.set_length(shape.seq)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def layers(self) -> Any:
        """Return the ModuleList of transformer layers."""
        return self.model.layers

    @property
    def layer_bytes(self) -> int:
        """Return the bytes that a layer saves in bf16 without checkpointing, each storage once.

        - two RMS norms: the input in fp32, its reciprocal root in fp32, the normalised input and the output in bf16;
        - attention: query, key and value after rotation, the output, and the logarithms of the kernel in fp32;
        - MLP: gate, its activation, up, and the product of the two.
        """
        shape, fp32, bf16 = self.shape, 4, 2
        norm = (fp32 + 2 * bf16) * shape.hidden + fp32
        key_value = 2 * shape.hidden // shape.heads * shape.kv_heads * bf16
        attention = 2 * shape.hidden * bf16 + key_value + shape.heads * fp32
        return (2 * norm + attention + 4 * shape.ffn * bf16) * self.tokens.numel()

    def set_length(self, seq: int) -> None:
        """Draw new random tokens, [1, seq]."""
        generator = torch.Generator(device=self.device).manual_seed(SEED)
        self.tokens = torch.randint(self.shape.vocab, (1, seq), generator=generator, device=self.device)
        dtype = next(self.model.parameters()).dtype
        sizes = (seq, self.shape.hidden)
        self._weights = [torch.randn(n, generator=generator, device=self.device, dtype=dtype).div_(n) for n in sizes]

    def step(self, attached: Attached) -> torch.Tensor:
        """Run forward and backward; return the loss.

        Gradients stay allocated, as they do where several microbatches add to them: else the memory of a step would
        have its peak where they are all there, at the end of the backward, when no activations are left.
        """
        self.model.zero_grad(set_to_none=False)
        with attached.around_step():
            with attached.around_forward():
                loss = self._loss()
            loss.backward()
        return loss.detach()

    def timed_step(self, attached: Attached) -> float:
        """Run one step; return its milliseconds, from an idle device to an idle device."""
        self.wait()
        begin = time.perf_counter()
        self.step(attached)
        self.wait()
        return (time.perf_counter() - begin) * 1e3

    def stamp(self) -> Any:
        """Mark this point of the current stream, on a GPU."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Return the gradients by names that do not depend on wrappers of the layers."""
        parameters = self.model.named_parameters()
        return {name.replace("_checkpoint_wrapped_module.", ""): parameter.grad for name, parameter in parameters}

    def make_gradients(self) -> None:
        """Fill in zeros where there are no gradients, as a step finds those of the one before it."""
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def _loss(self) -> torch.Tensor:
        # A weighted sum over tokens and features: its gradients are not all alike, and it keeps nothing large.
        by_token, by_feature = self._weights
        return torch.dot((self.model(input_ids=self.tokens).last_hidden_state @ by_feature).flatten(), by_token)


def _register_attention(length: int) -> str:
    """Register attention within documents of `length` tokens; return the name by which transformers finds it.

    What is saved for the backward is what attention to the whole sequence saves: queries, keys, values, the output and
    a number for each query and head. What it computes grows with the sequence, not with its square.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def forward(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        # [1, heads, seq, dim] -> [documents, heads, length, dim], views
        cut = (t.squeeze(0).unflatten(1, (-1, length)).transpose(0, 1) for t in (query, key, value))
        out, _ = sdpa_attention_forward(module, *cut, *args, **kwargs)  # [documents, length, heads, dim]
        return out.flatten(0, 1).unsqueeze(0), None

    name = f"documents_of_{length}"
    AttentionInterface.register(name, forward)
    return name


Attach = Callable[[Workload], AbstractContextManager[Attached]]


def attaching(put: Callable[[Workload, ExitStack], Attached]) -> Attach:
    """Make a context manager of what puts a contender on a model, and leaves on the stack what takes it off again."""

    @contextmanager
    def attach(workload: Workload) -> Iterator[Attached]:
        with ExitStack() as stack:
            yield put(workload, stack)

    return attach
