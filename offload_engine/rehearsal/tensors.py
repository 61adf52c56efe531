# SPDX-License-Identifier: Apache-2.0
"""`HollowTensors`: runs torch operators without computing, on tensors that have sizes but no contents.

A hollow tensor is an ordinary tensor on the CPU whose pages are never touched, so it takes no memory. Types, storages,
strides, saved tensors and references are those of a real step, so the engine and its brackets run unchanged. Integers
are computed as long as they depend only on integers, because sizes are made from them; any other small tensor reads as
zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offload_engine.rehearsal.allocated import AllocatedBytes
from offload_engine.rehearsal.costs import KernelCosts
from offload_engine.rehearsal.operators import COMMUNICATE, VIEW, WRITE, Operator, operator_of

T = TypeVar("T")
_MOST_COMPUTED: Final = 64 << 20
"""Elements: a larger tensor is hollow whatever it holds."""
_ZEROED: Final = 1 << 16
"""Elements: a smaller tensor reads as zero; the memory of a larger one is never touched."""
_FLOAT_OF_INTEGERS: Final = ("div", "mean", "rand_like", "randn_like")


class _Made(NamedTuple):
    """Results of an operator for arguments of some sizes."""

    shapes: Any
    """On the meta device."""
    milliseconds: float


class HollowTensors(TorchDispatchMode):
    """Keeps operators from computing floats while in force; each is counted and takes its time on a virtual clock.

    Args:
        costs: costs of kernels.
        peer_gbps: bandwidth of communication, in 10^9 bytes a second.

    Attributes:
        allocated: counts allocated bytes.
        run: called with the milliseconds and the name of each kernel, in order.
    """

    def __init__(self, costs: KernelCosts, peer_gbps: float) -> None:
        super().__init__()
        self._hollow: set[int] = set()
        self.allocated = AllocatedBytes(self._hollow.discard)
        self.run: Callable[[float, str], None] = _nothing
        self._costs = costs
        self._peer_gbps = peer_gbps
        self._operators: dict[Any, Operator] = {}
        self._made: dict[Any, _Made] = {}
        self._is_in_fused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = operator_of(func)
        kwargs = kwargs or {}
        if operator.kind is VIEW:
            return func(*args, **kwargs)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if operator.kind is COMMUNICATE:
            return self._communicate(operator, args, kwargs)
        if self._is_computed(operator, args, kwargs):
            return self._note_all(func(*args, **kwargs))
        if operator.kind is WRITE:
            return self._write(operator, args, kwargs)
        return self._make(operator, args, kwargs)

    def fused(self, function: Callable[..., T]) -> Callable[..., T]:
        """Wrap a function that a compiler turns into one kernel: its operators allocate only the results.

        If it is differentiated, it runs unchanged.
        """

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> T:
            if torch.is_grad_enabled() or self._is_in_fused:
                return function(*args, **kwargs)
            self._is_in_fused = True
            try:
                out = function(*args, **kwargs)
            finally:
                self._is_in_fused = False
            self._note_all(out)
            touched = tensors_in((args, kwargs, out))
            self.run(self._costs.milliseconds_of_bytes(touched), getattr(function, "__name__", "fused"))
            return out

        return call

    # -- private -----------------------------------------------------------------------------------------------------

    def _note_all(self, out: Any) -> Any:
        if not self._is_in_fused:
            for tensor in tensors_in(out):
                self.allocated.note(tensor.untyped_storage())
        return out

    def _is_computed(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether an operator takes and returns only integers, all of them known."""
        has_tensors = False
        for tensor in tensors_in((args, kwargs)):
            has_tensors = True
            if not self._is_known(tensor):
                return False
        dtype = kwargs.get("dtype")
        if dtype is not None:
            return not dtype.is_floating_point and _number_of(args) <= _MOST_COMPUTED
        if has_tensors:
            return operator.name not in _FLOAT_OF_INTEGERS
        return operator.name in ("arange", "scalar_tensor") and not any(isinstance(arg, float) for arg in args)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return (
            not tensor.is_floating_point()
            and tensor.numel() <= _MOST_COMPUTED
            and tensor.untyped_storage()._cdata not in self._hollow
        )

    def _write(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments that are written to."""
        named = dict(zip(operator.names, args, strict=False)) | kwargs
        for name in operator.written:
            for tensor in tensors_in(named.get(name)):
                if not tensor.is_floating_point():
                    self._mark_hollow(tensor)
        results = [named[name] for name in operator.written][: operator.num_returns]
        self._spend(operator, args, kwargs, results)
        if not operator.num_returns:
            return None
        return results[0] if len(results) == 1 else tuple(results)

    def _make(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return new tensors of the sizes that the operator has on the meta device."""
        if operator.name == "masked_select":
            return self._selected(*args, **kwargs)
        key = _key_of((operator.func, args, kwargs))
        made = None if key is None else self._made.get(key)
        if made is None:
            made = self._find_out(operator, args, kwargs)
            if key is not None:
                self._made[key] = made
        out = _mapped(made.shapes, self._make_like)
        if made.milliseconds and not self._is_in_fused:
            self.run(made.milliseconds, operator.name)
        return out

    def _find_out(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Made:
        on_meta = _mapped(kwargs, _to_meta)
        if operator.takes_device:
            on_meta["device"] = "meta"
        shapes = operator.func(*_mapped(args, _to_meta), **on_meta)
        touched = [*tensors_in((args, kwargs)), *tensors_in(shapes)]
        milliseconds = 0.0
        if not operator.name.startswith(("empty", "new_empty")):
            milliseconds = self._costs.milliseconds(operator.func, args, kwargs, shapes, touched)
        return _Made(shapes, milliseconds)

    def _spend(self, operator: Operator, args: Any, kwargs: Any, out: Any) -> None:
        if not self._is_in_fused:
            touched = tensors_in((args, kwargs, out))  # written tensors are read before
            milliseconds = self._costs.milliseconds(operator.func, args, kwargs, out, touched)
            self.run(milliseconds, operator.name)

    def _make_like(self, meta: torch.Tensor) -> torch.Tensor:
        tensor = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)
        if meta.numel() <= _ZEROED:
            tensor.zero_()  # this mode is not in force inside itself
        self._note_all(tensor)
        if not tensor.is_floating_point():
            self._mark_hollow(tensor)
        return tensor

    def _selected(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return as many values as a known mask has."""
        return self._make_like(torch.empty(int(mask.sum()), dtype=values.dtype, device="meta"))

    def _mark_hollow(self, tensor: torch.Tensor) -> None:
        self._hollow.add(tensor.untyped_storage()._cdata)

    def _communicate(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Spend the time of a communication; integers are exchanged as if all ranks had those of this one."""
        tensors = list(tensors_in((args, kwargs)))
        if operator.name not in ("send", "recv_"):  # the pipeline's order is simulated
            nbytes = max((t.numel() * t.element_size() for t in tensors), default=0)
            self.run(nbytes / self._peer_gbps / 1e6, operator.name)
        if all(not tensor.is_floating_point() for tensor in tensors):
            return operator.func(*args, **kwargs)
        done: Any = torch.futures.Future()
        done.set_result(None)
        c10d: Any = torch._C._distributed_c10d
        work = c10d._create_work_from_future(done).boxed()
        results = args[: operator.num_returns - 1]
        return (*results, work) if operator.num_returns > 1 else work


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(tuple(values.values()))


def _mapped(values: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(values, torch.Tensor):
        return function(values)
    if isinstance(values, (tuple, list)):
        return type(values)([_mapped(value, function) for value in values])
    if isinstance(values, dict):
        return {name: _mapped(value, function) for name, value in values.items()}
    return values


def _key_of(values: Any) -> Any:
    """Return a key that distinguishes sizes and settings; None if a value cannot be compared."""

    try:
        key = _part_of_key(values)
        hash(key)
    except TypeError:
        return None
    return key


def _part_of_key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple([_part_of_key(each) for each in value])
    if isinstance(value, dict):
        return tuple([(name, _part_of_key(each)) for name, each in value.items()])
    return type(value), value  # 1 and True are equal


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _number_of(args: tuple[Any, ...]) -> int:
    sizes = args[0] if args and isinstance(args[0], (list, tuple)) else ()
    return int(torch.Size(sizes).numel())


def _nothing(milliseconds: float, name: str) -> None:
    pass
