# SPDX-License-Identifier: Apache-2.0
"""A random training job of one pipeline rank, small enough to run by the hundred, with and without the engine.

`Case.draw(seed)` decides everything beforehand: the model, the order of forwards and backwards, bounds of the engine,
what goes wrong where. `run(case, with_engine)` then does the same arithmetic in the same order either way, so results
must agree to the last bit.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from offload_engine import (
    Action,
    ChunkKey,
    ChunkOffloadHandler,
    CopyError,
    FixedBounds,
    GroupTraits,
    GroupWindow,
    IterationStats,
    LowestPeak,
    OffloadConfig,
    OffloadEngine,
    Planned,
    PrefetchWindow,
    ResidencyMeter,
    ResidentBudget,
    ResidentLayers,
    SavedTensorTracker,
    group_commit,
    group_start,
)
from offload_engine.policies import PolicySettings
from tests.adversarial import AdversarialDevice, AdversarialStream
from tests.lookups import present

HIDDEN = 8


# ---- blocks: what a group may save


class Dense(nn.Module):
    """Saves its input and a transposed view of its weight; its output is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class InPlace(Dense):
    """Modifies an unsaved tensor in place, and saves the result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).add_(0.1).relu_()


class InPlaceInput(Dense):
    """Modifies its own input; only legal where that is not saved."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.mul_(0.9).tanh_())


class Gated(Dense):
    """Two activations of one projection: the halves are views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, 2 * HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.linear(x).chunk(2, dim=-1)
        return nn.functional.dropout(torch.sigmoid(gate) * value.tanh(), 0.2)


class Attention(Dense):
    """Query, key and value are strided views of one projection; keys are used transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, 3 * HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(0, 1) for part in self.linear(x).chunk(3, dim=-1))
        scores = torch.softmax(query @ key.transpose(1, 2), dim=-1)
        return (scores @ value).transpose(0, 1).flatten(1)


class Norm(nn.Module):
    """Saves small statistics beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class Sigmoid(nn.Module):
    """Saves its output, which the group behind saves again: one storage, two groups."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x)


class Gram(nn.Module):
    """Saves x and x.t(): equal storage, other strides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ (x.t() @ x))


class HalfPrecision(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.to(torch.bfloat16)
        return (half * half.cos()).to(torch.float32)


class Complex(nn.Module):
    """Saves conjugated views."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2)))
        return torch.view_as_real(z.conj() * z.exp().conj()).flatten(1).tanh()


class Pick(nn.Module):
    """Saves integers and masks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = x.detach().sum(1).argsort()
        picked = torch.where(x > 0, x, 0.5 * x).index_select(0, order)
        return picked.gather(1, picked.detach().argsort(1))


class Scaled(nn.Module):
    """Saves an expanded view (strides of zero) and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale.exp().expand_as(x) * x.mean(0, keepdim=True).expand_as(x).cos()


class UnusedBranch(Dense):
    """Saves tensors that no backward ever asks for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.sin(torch.exp(self.linear(x)))
        return torch.cos(x)


class _Keeps(torch.autograd.Function):
    """Keeps the graph of another tensor, through which no gradient comes, until its own backward is over."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        ctx.kept = kept
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class Rewritten(Dense):
    """Saves one storage at three versions; only of the last one a backward asks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, kept = self.linear(x), []
        for _ in range(2):
            kept.append(torch.sin(y))
            y = y.add_(0.1)
        return _Keeps.apply(torch.cos(y), kept)


class _Views(torch.autograd.Function):
    """Saves overlapping views of one storage: a prefix, a transposed middle, every second row; and odd small things."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        rows = len(x)
        all_rows = torch.cat([x, x.cos(), x.sin()])
        prefix, middle, strided = all_rows[:rows], all_rows[rows : 2 * rows].t(), all_rows[1::2]
        ctx.save_for_backward(prefix, middle, strided, all_rows.mean(), torch.arange(rows), x > 0, x.new_empty(0))
        return all_rows[rows:].view(2, rows, HIDDEN).sum(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> torch.Tensor:
        prefix, middle, strided, mean, index, mask, nothing = ctx.saved_tensors
        assert nothing.numel() == 0
        grad = grads[0] * middle.t() + prefix.tanh() * mean + strided.sum(0)
        return torch.where(mask, grad, -grad)[index] / HIDDEN


class Views(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Views.apply(x).tanh()


class _Recompute(torch.autograd.Function):
    """Reentrant checkpointing; torch's own would import the compiler."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: nn.Module) -> torch.Tensor:
        ctx.block, ctx.random_state = block, torch.get_rng_state()
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        state = torch.get_rng_state()
        torch.set_rng_state(ctx.random_state)
        with torch.enable_grad():
            out = ctx.block(x)
        torch.set_rng_state(state)
        torch.autograd.backward(out, grads[0])
        return x.grad, None


class Pair(nn.Module):
    """A bracketed block around two bracketed blocks."""

    def __init__(self, first: Unit, second: Unit) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cos(self.second(torch.sin(self.first(x))))


_BLOCKS: tuple[type[nn.Module], ...] = (
    *(Dense, InPlace, InPlaceInput, Gated, Attention, Norm, Sigmoid, Gram, HalfPrecision, Complex),
    *(Pick, Scaled, UnusedBranch, Rewritten, Views),
)
_OUTPUT_UNSAVED = (Dense, InPlaceInput)  # the next block may write into their output
# A residual connection around a bracket adds one more gradient to its input; with more than two in all, the brackets
# would change the order of the additions and so the last bit.
_INPUT_READ_ONCE = (Dense, InPlace, Gated, Attention, Norm, Sigmoid, HalfPrecision, Complex, UnusedBranch, Views)


class InjectedError(Exception):
    """What the tests raise in the middle of a step."""


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise InjectedError("in backward")


# ---- a case: everything that is decided beforehand


@dataclass(frozen=True)
class Failure:
    """Something that goes wrong in a step: at a unit in forward or backward, or in a copy."""

    where: str  # "forward", "backward", "out", "in"
    action: int
    unit: int
    after: int


@dataclass
class Step:
    actions: list[Action]
    announced: list[Action] | None  # what the engine is told: usually the truth
    rows: dict[int, int]  # of each microbatch
    keep: dict[ChunkKey, frozenset[int]]
    retained: frozenset[int]  # actions whose backward runs twice
    evaluations: frozenset[int]  # actions before which a forward without gradients runs
    failure: Failure | None = None
    seed: int = 0


@dataclass
class Case:
    seed: int
    num_stages: int
    units_per_stage: int
    is_chained: bool
    has_comm_stream: bool
    passes_weights: bool
    tracks_rest: bool
    manages_rest: bool
    tells_backward: bool
    deallocates: bool
    config: OffloadConfig
    host_capacity: int | None
    device_seed: int | None
    steps: list[Step] = field(default_factory=list)

    @classmethod
    def draw(cls, seed: int) -> Case:
        rng = random.Random(seed)
        min_bytes = rng.choice((0, 0, 64, 200))
        limit = rng.choice((None, None, min_bytes, 256, 700, 2000, 10_000))
        config = OffloadConfig(
            min_tensor_bytes=min_bytes,
            host_limit_bytes=None if limit is None else max(limit, min_bytes),
            policy=_draw_policy(rng, random.Random(seed + 3)),
        )
        case = cls(
            seed=seed,
            num_stages=rng.choice((1, 1, 2, 3)),
            units_per_stage=rng.randint(1, 5),
            is_chained=rng.random() < 0.6,
            has_comm_stream=rng.random() < 0.3,
            passes_weights=rng.random() < 0.9,
            tracks_rest=rng.random() < 0.5,
            manages_rest=random.Random(seed + 1).random() < 0.5,  # drawn apart: the other draws stay as they were
            tells_backward=random.Random(seed + 7).random() < 0.5,
            deallocates=rng.random() < 0.5,
            config=config,
            host_capacity=rng.choice((4096, 1 << 16)) if limit is not None else rng.choice((1500, 1 << 14, 1 << 18)),
            device_seed=rng.choice((None, rng.randrange(1 << 30))),
        )
        case.steps = [case._draw_step(rng) for _ in range(rng.randint(1, 2))]
        if rng.random() < 0.4:  # a step that fails, and one more that must be right
            broken = case._draw_step(rng)
            broken.failure = case._draw_failure(rng, broken)
            case.steps[rng.randint(0, len(case.steps) - 1) : 0] = [broken]
        if isinstance(case.config.policy, Planned):  # a plan takes a step to learn from
            case.steps = [step for step in case.steps for _ in range(2)]
        return case

    def _draw_step(self, rng: random.Random) -> Step:
        num_microbatches = rng.randint(1, 6 // self.num_stages + 1)
        actions = _draw_actions(rng, self.num_stages, num_microbatches, self.is_chained)
        backwards = [i for i, action in enumerate(actions) if action.kind == "B"]
        announced: list[Action] | None = actions
        if rng.random() < 0.3:
            announced = rng.choice((None, rng.sample(actions, len(actions))))
        return Step(
            actions=actions,
            announced=announced,
            rows={microbatch: rng.randint(2, 6) for microbatch in range(num_microbatches)},
            keep={a.chunk: frozenset(i for i in range(8) if rng.random() < 0.2) for a in actions if rng.random() < 0.3},
            retained=frozenset(i for i in backwards if rng.random() < 0.1),
            evaluations=frozenset(i for i in range(len(actions) + 1) if rng.random() < 0.1),
            seed=rng.randrange(1 << 30),
        )

    def _draw_failure(self, rng: random.Random, step: Step) -> Failure:
        return Failure(
            where=rng.choice(("forward", "backward", "out", "in")),
            action=rng.randrange(len(step.actions)),
            unit=rng.randrange(self.units_per_stage),
            after=rng.randrange(20),
        )


def _draw_policy(rng: random.Random, other: random.Random) -> PolicySettings:
    """Half of the pipelines run under bounds in bytes, or none; the others under one of the other policies."""
    sizes = (None, None, 0, 1, 400, 2000, 1 << 30)
    horizon_bytes, max_inflight_bytes = rng.choice(sizes), rng.choice(sizes)
    if other.random() < 0.5:
        return other.choice(
            (
                ResidentBudget(other.choice((0, 300, 1000, 4000, 1 << 30))),
                ResidentLayers(other.randint(1, 3)),
                GroupWindow(other.randint(1, 4)),
                PrefetchWindow(other.randint(1, 4)),
                Planned(),
                Planned(horizon_bytes=other.choice((0, 400, 2000)), max_inflight_bytes=other.choice((0, 400, 2000))),
                Planned(resident_bytes=other.choice((0, 300, 1000, 4000, 1 << 30))),
            )
        )
    if horizon_bytes is None and max_inflight_bytes is None:
        return LowestPeak()
    return FixedBounds(horizon_bytes=horizon_bytes, max_inflight_bytes=max_inflight_bytes)


def _draw_actions(rng: random.Random, num_stages: int, num_microbatches: int, is_chained: bool) -> list[Action]:
    """Return a random order that respects the data: 1F1B-like, all forwards first, or anything in between."""
    max_in_flight = rng.choice((1, 2, 3, num_stages * num_microbatches)) * (num_stages if is_chained else 1)
    takes_oldest = rng.random() < 0.7
    todo = [ChunkKey(s, m) for m in range(num_microbatches) for s in range(num_stages)]
    done: list[ChunkKey] = []
    in_flight: list[ChunkKey] = []
    actions: list[Action] = []
    while todo or in_flight:
        forwards = [k for k in todo if not is_chained or k.stage == 0 or ChunkKey(k.stage - 1, k.microbatch) in done]
        # A chained stage gets its gradient from the stage behind it, so that one goes first.
        backwards = [
            k
            for k in in_flight
            if not is_chained
            or not any(o.microbatch == k.microbatch and o.stage > k.stage for o in (*in_flight, *todo))
        ]
        if forwards and (not backwards or len(in_flight) < max_in_flight):
            key = forwards[0]
            todo.remove(key)
            in_flight.append(key)
            done.append(key)
            actions.append(Action("F", key))
        else:
            key = backwards[0 if takes_oldest else -1]
            in_flight.remove(key)
            actions.append(Action("B", key))
    return actions


# ---- the model, and one run of a case


def has_layers(case: Case) -> bool:
    """Tell whether groups are given their layers: two units each."""
    return random.Random(case.seed + 11).random() < 0.7


class Unit(nn.Module):
    """One block, with the brackets around it."""

    def __init__(self, runner: Runner, block: nn.Module, rng: random.Random, index: int) -> None:
        super().__init__()
        self.block = block
        self.index = index
        self.is_bracketed = rng.random() < 0.85
        self.is_recomputed = rng.random() < 0.15 and not isinstance(block, (InPlaceInput, Pair))
        self.is_on_comm = runner.case.has_comm_stream and rng.random() < 0.5
        # Its output is not used. Not where it writes into its input: what follows would miss that part of the graph,
        # because a bracket hands its block an alias.
        self.is_on_the_side = rng.random() < 0.08 and not isinstance(block, InPlaceInput)
        self.is_excluded = rng.random() < 0.05
        self.has_residual = rng.random() < 0.3 and type(block) in _INPUT_READ_ONCE
        self.scales_output = type(block) in _OUTPUT_UNSAVED and rng.random() < 0.5
        # Its input is held until backward, unread. Not in a pair, where the other unit reads it too.
        drawn_apart = random.Random(runner.case.seed + 2 + index)
        self.is_input_held = index >= 0 and drawn_apart.random() < 0.3 and not isinstance(block, InPlaceInput)
        self.is_input_held &= self.is_bracketed or runner.case.manages_rest  # else no hook sees who reads it
        self.layer = index // 2 if has_layers(runner.case) else -1
        # Its copy-out waits; the device has work again behind it; it begins the tail of the forward.
        self.may_delay, self.ends_wait, self.begins_tail = (drawn_apart.random() < share for share in (0.4, 0.3, 0.15))
        self._runner: tuple[Runner] = (runner,)  # in a tuple: not a submodule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        runner = self._runner[0]
        with runner.comm_stream(x) if self.is_on_comm else nullcontext() as finish:
            out = self._bracketed(x, runner)
            if finish is not None:
                finish(out)
        if self.scales_output:
            out.mul_(0.5)  # the model may write into the output of a group
        if self.is_on_the_side:
            out = x * 1
        elif self.has_residual:
            out = out + x
        if self.is_input_held:
            runner.keep_unread(x)
        return out

    def _bracketed(self, x: torch.Tensor, runner: Runner) -> torch.Tensor:
        engine = runner.engine
        if engine is None or not engine.is_active:
            return self._inner(x, runner)
        chunk = present(engine.current_chunk)
        if self.begins_tail:
            chunk.begin_tail(x if x.requires_grad else None)
        if not self.is_bracketed:
            return self._inner(x, runner)
        if self.is_excluded:
            engine.exclude(x)
        x = group_start(x, chunk, type(self.block).__name__, GroupTraits(may_delay=self.may_delay, layer=self.layer))
        group = present(chunk.groups.innermost)
        with chunk.saved_tensors_hooks():
            out = self._inner(x, runner)
        out = group_commit(out, chunk)
        if runner.device is not None:
            runner.device.note_produced(saved.buffer for saved in group.storages)
        if self.ends_wait:
            chunk.note_launch()
        return out

    def _inner(self, x: torch.Tensor, runner: Runner) -> torch.Tensor:
        if self.is_recomputed:
            out = _Recompute.apply(x, self.block)
        else:
            out = self.block(x)
        return runner.maybe_fail(self.index, out)


class Runner:
    """One run of a case: the model, the engine if there is one, and the tensors in flight."""

    def __init__(self, case: Case, with_engine: bool) -> None:
        self.case = case
        self.device: AdversarialDevice | None = None
        self.engine: OffloadEngine | None = None
        self.meter = ResidencyMeter()
        if with_engine:
            self.device = AdversarialDevice(case.device_seed, case.host_capacity)
            self.engine = OffloadEngine(case.config, device=self.device, meter=self.meter)
        torch.manual_seed(case.seed)
        rng = random.Random(case.seed)
        self.stages = nn.ModuleList(self._make_stage(rng) for _ in range(case.num_stages))
        self.stats: list[IterationStats] = []
        self._failure: Failure | None = None
        self._action = -1
        self._inputs: dict[ChunkKey, torch.Tensor] = {}
        self._outputs: dict[ChunkKey, torch.Tensor] = {}
        self._unread: defaultdict[ChunkKey, list[torch.Tensor]] = defaultdict(list)
        self._chunks: dict[ChunkKey, ChunkOffloadHandler] = {}  # that are told when their backward begins
        self._tagged: set[Any] = set()

    @property
    def hazards(self) -> list[str]:
        """Return what the device found; nothing without the engine."""
        return self.device.hazards if self.device is not None else []

    # -- steps

    def run(self) -> list[list[torch.Tensor] | None]:
        """Return the numbers of each step: losses, gradients of inputs and parameters; None for a step that failed."""
        with self.device.observe_compute() if self.device is not None else nullcontext():
            results = [self._run_step(step) for step in self.case.steps]
            results.append([p.detach().clone() for p in self.stages.parameters()])
        if self.engine is not None:
            self.engine.close()
            self.engine.close()
        return results

    def _run_step(self, step: Step) -> list[torch.Tensor] | None:
        self.stages.zero_grad()
        torch.manual_seed(step.seed)
        try:
            results = self._attempt(step)
        except (InjectedError, CopyError):
            assert step.failure is not None, "only a step told to fail may fail"
            results = None
        self._failure = None
        if results is None:
            self._recover()
        if self.device is not None:
            self.device.forget_failures()
        self._check_nothing_left()
        if results is not None and step.failure is None:  # else the run without engine may differ in this step
            with torch.no_grad():
                for parameter in self.stages.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad.clamp(-1, 1), alpha=0.01)
        return results

    def _attempt(self, step: Step) -> list[torch.Tensor]:
        self._arm(step.failure)
        if self.engine is not None:
            # With two streams always: the allocator is not told which streams use a weight, as it is never freed.
            names_weights = self.case.passes_weights or self.case.has_comm_stream
            weights = list(self.stages.parameters()) if names_weights else []
            self.engine.begin_iteration(step.announced, weights)
        results: list[torch.Tensor] = []
        for position, action in enumerate(step.actions):
            self._action = position
            if position in step.evaluations:
                self._evaluate(action.chunk, step)
            if action.kind == "F":
                self._forward(action.chunk, step)
            else:
                results += self._backward(action.chunk, step, position in step.retained)
        self._inputs.clear()
        if self.engine is not None:
            self.stats.append(self.engine.end_iteration())
            assert self.stats[-1].num_storages_left == 0
        if len(step.actions) in step.evaluations:
            self._evaluate(step.actions[0].chunk, step)
        results += [torch.zeros(()) if p.grad is None else p.grad.clone() for p in self.stages.parameters()]
        return results

    def _recover(self) -> None:
        """What the training loop does after an exception; tensors of the step may go before or after the reset."""
        is_dropped_first = self.case.seed % 2 == 0
        if self.device is not None:
            self.device.set_current()
        if is_dropped_first:
            self._drop_all()
        if self.engine is not None:
            self.engine.reset_iteration()
            self.engine.reset_iteration()
            self._check_restored(*self._unread)
        self._drop_all()

    def _drop_all(self) -> None:
        self._inputs.clear()
        self._outputs.clear()
        self._tagged.clear()
        self._unread.clear()
        self._chunks.clear()

    def _check_restored(self, *chunks: ChunkKey) -> None:
        assert all(x.untyped_storage().nbytes() > 0 for chunk in chunks for x in self._unread.pop(chunk, []))

    def _check_nothing_left(self) -> None:
        if self.engine is not None:
            assert self.engine.pool.num_leases == 0
            assert self.engine.pool.lent_bytes == 0
            assert self.meter.current_bytes == 0
            assert not self.engine.is_active and self.engine.current_chunk is None

    # -- one chunk

    def _forward(self, key: ChunkKey, step: Step) -> None:
        x = self._inputs[key] = self._input_of(key, step)
        rest: AbstractContextManager[Any] = nullcontext()
        if self.engine is not None:
            chunk = self.engine.start_chunk(key, keep_groups=step.keep.get(key, frozenset()))
            if self.case.tells_backward:
                self._chunks[key] = chunk
            if self.case.manages_rest:
                rest = chunk.hooks.around_groups()
        with self._tracker(), rest:
            out = self.stages[key.stage](x)
            if self.engine is not None and random.Random(step.seed + hash(key)).random() < 0.3:
                chunk.offload_kept_groups()
            if not self._is_sent(key):
                out = (out * out.detach().cos()).mean()
        self._outputs[key] = out
        self._follow_streams(out, None)
        self._tagged.clear()
        if self._is_sent(key):
            following = ChunkKey(key.stage + 1, key.microbatch)
            self._inputs[following] = out.detach().clone().requires_grad_()
            if self.case.deallocates:
                out.data = torch.empty(1)  # as megatron-core's deallocate_pipeline_outputs

    def _backward(self, key: ChunkKey, step: Step, is_retained: bool) -> list[torch.Tensor]:
        out = self._outputs.pop(key)
        is_sent = self._is_sent(key)
        grad = present(
            self._inputs.pop(ChunkKey(key.stage + 1, key.microbatch)).grad if is_sent else torch.ones_like(out)
        )
        if key in self._chunks:
            chunk = self._chunks.pop(key)
            if random.Random(step.seed + hash(key)).random() < 0.2:  # a front-end's, which knows of no backward before
                chunk.recall_groups()
            chunk.begin_backward()
            if not is_sent:
                chunk.end_loss()
        for retain in (True, False) if is_retained else (False,):
            torch.autograd.Variable._execution_engine.run_backward(  # as megatron-core: shapes are not compared
                (out,), (grad,), retain, False, (), allow_unreachable=True, accumulate_grad=True
            )
            self._join_streams()
        self._check_restored(key)
        x_grad = present(self._inputs[key].grad)
        if key.stage == 0 or not self.case.is_chained:
            del self._inputs[key]
        return [x_grad.clone()] if is_sent else [out.detach().clone(), x_grad.clone()]

    def _evaluate(self, key: ChunkKey, step: Step) -> None:
        state = torch.get_rng_state()
        failure, self._failure = self._failure, None
        with torch.no_grad():
            self.stages[key.stage](torch.ones(step.rows[key.microbatch], HIDDEN))
        self._failure = failure
        torch.set_rng_state(state)

    def _is_sent(self, key: ChunkKey) -> bool:
        return self.case.is_chained and key.stage + 1 < self.case.num_stages

    def _input_of(self, key: ChunkKey, step: Step) -> torch.Tensor:
        if self.case.is_chained and key.stage > 0:
            return self._inputs[key]
        return torch.randn(step.rows[key.microbatch], HIDDEN, requires_grad=True)

    def _tracker(self) -> AbstractContextManager[Any]:
        if self.engine is None or not self.case.tracks_rest:
            return nullcontext()
        return SavedTensorTracker(self.meter, self.stages.parameters())

    # -- the model

    def _make_stage(self, rng: random.Random) -> nn.Sequential:
        units: list[nn.Module] = [nn.Linear(HIDDEN, HIDDEN)]
        blocks: list[nn.Module] = [Sigmoid()]
        for index in range(self.case.units_per_stage):
            blocks.append(self._make_block(rng, blocks[-1], index))
            units.append(Unit(self, blocks[-1], rng, index))
            if units[-1].has_residual or units[-1].is_on_the_side:
                blocks.append(Sigmoid())  # its output is not the block's own
        return nn.Sequential(*units)

    def _make_block(self, rng: random.Random, previous: nn.Module, index: int) -> nn.Module:
        if rng.random() < 0.08:
            return Pair(*(Unit(self, self._make_block(rng, Sigmoid(), index), rng, -1) for _ in range(2)))
        kinds = [b for b in _BLOCKS if b is not InPlaceInput or type(previous) in _OUTPUT_UNSAVED]
        return rng.choice(kinds)()

    # -- what goes wrong

    def _arm(self, failure: Failure | None) -> None:
        self._failure = failure
        if failure is not None and failure.where in ("out", "in") and self.device is not None:
            self.device.fail_next_copy(failure.where, failure.after)

    def maybe_fail(self, unit: int, out: torch.Tensor) -> torch.Tensor:
        """Raise the drawn failure where it is due; called behind each block, inside its group."""
        failure = self._failure
        if failure is None or failure.unit != unit or failure.action > self._action:
            return out
        if failure.where == "forward":
            raise InjectedError("in forward")
        return _RaiseInBackward.apply(out) if failure.where == "backward" else out

    def keep_unread(self, x: torch.Tensor) -> None:
        """Keep `x` as schedules keep the inputs of stages, and tell the engine so."""
        if self.engine is not None and self.engine.is_active:
            assert self.engine.current_chunk is not None
            self._unread[self.engine.current_chunk.key].append(x)
            self.engine.held_elsewhere(x)

    # -- compute streams: what autograd and the model's author do on a GPU

    @contextmanager
    def comm_stream(self, x: torch.Tensor) -> Iterator[Callable[[torch.Tensor], None] | None]:
        """Run on the second compute stream, waiting for the first before and making it wait behind."""
        device = self.device
        if device is None:
            yield None
            return
        main = device.current_stream()
        self._follow_streams(x, main)
        before = device.record_event(main)
        with device.compute_stream("comm") as comm:
            device.wait_event(comm, before)
            device.record_stream(x, comm)

            def finish(out: torch.Tensor) -> None:
                self._follow_streams(out, comm)
                device.record_stream(out, main)

            yield finish
        device.wait_event(main, device.record_event(comm))

    def _follow_streams(self, tensor: torch.Tensor, stream: AdversarialStream | None) -> None:
        """Nodes of the graph made since the last call run their backward on `stream`, as autograd does it."""
        device = self.device
        if device is None or not self.case.has_comm_stream or tensor.grad_fn is None:
            return
        nodes: list[torch.autograd.graph.Node | None] = [tensor.grad_fn]
        while nodes:
            node = nodes.pop()
            if node is None or node in self._tagged or node.name().endswith("AccumulateGrad"):
                continue
            self._tagged.add(node)
            node.register_prehook(_switcher(device, stream))
            nodes += [following for following, _ in node.next_functions]

    def _join_streams(self) -> None:
        """Behind a backward, autograd makes the caller's stream wait for every stream it used."""
        if self.device is None:
            return
        self.device.set_current()
        if self.case.has_comm_stream:
            main = self.device.current_stream()
            with self.device.compute_stream("comm") as comm:
                self.device.wait_event(main, self.device.record_event(comm))


def _switcher(device: AdversarialDevice, stream: AdversarialStream | None) -> Callable[[Any], None]:
    def switch(grads: Any) -> None:
        device.set_current(stream)
        device.wait_for_writers(grads)

    return switch
