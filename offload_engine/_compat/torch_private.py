# SPDX-License-Identifier: Apache-2.0
"""Binds every private name of torch that the two packages use.

Code on a hot path binds a name again at module level, `_use_count: Final[Any] = torch_private.use_count`, so that a
call costs no more than in torch. tests/cpu/test_torch_private.py probes what each name means.

Private attributes of tensors, storages, nodes and modules are read where they are needed: a function around each would
cost as much as the read. They are listed below, and checked when this module is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn

import torch
import torch.utils._pytree

SUPPORTED: Final = "torch 2.11 to 2.15"
_MISSING: Final = object()

# Private attributes that the two packages may read anywhere.
TENSOR_ATTRIBUTES: Final = ("_backward_hooks", "_base", "_is_view", "_is_zerotensor", "_version")
STORAGE_ATTRIBUTES: Final = ("_cdata", "_weak_ref")
NODE_ATTRIBUTES: Final = ("_register_hook_dict", "_sequence_nr")
MODULE_ATTRIBUTES: Final = (
    "_buffers",
    "_compiled_call_impl",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_parameters",
)
SCHEDULE_ATTRIBUTES: Final = ("_n_microbatches", "_stage", "_stages")
"""Attributes of schedules of `torch.distributed.pipelining`, read by `of_schedule` only."""


def take(path: str) -> Any:
    """Return the object that `path`, such as "torch._C._storage_Use_Count", names.

    Raises:
        ImportError: if this torch has no such name.
    """
    found: Any = torch
    for name in path.split(".")[1:]:
        found = getattr(found, name, _MISSING)
        if found is _MISSING:
            raise _import_error(path)
    return found


def take_or_refuse(path: str) -> Any:
    """Work like `take`, for names that only some builds of torch have; if missing, return a function that raises."""
    try:
        return take(path)
    except ImportError as error:
        message = str(error)

        def refuse(*args: object) -> NoReturn:
            raise ImportError(message)

        return refuse


def check_attributes(owner: object, path: str, names: tuple[str, ...]) -> None:
    """Check the attributes of `owner`, a class, or an instance of the class at `path`.

    Raises:
        ImportError: if one is missing.
    """
    for name in names:
        if getattr(owner, name, _MISSING) is _MISSING:
            raise _import_error(f"{path}.{name}")


def _import_error(path: str) -> ImportError:
    return ImportError(
        f"offload_engine needs {path} ({SUPPORTED}); torch {torch.__version__} has none: install a torch between "
        "those two, or a later offload_engine that supports this one",
        name=__name__,
    )


# -- saved tensors: hooks, and which are innermost; torch's context manager cannot tell

innermost_hooks: Final[Callable[[bool], tuple[Any, Any] | None]] = take(
    "torch._C._autograd._top_saved_tensors_default_hooks"
)
"""The pair of the innermost `saved_tensors_hooks` of this thread, or None; with True also while a tracer runs."""
push_hooks: Final[Callable[[Any, Any], None]] = take("torch._C._autograd._push_saved_tensors_default_hooks")
pop_hooks: Final[Callable[[], None]] = take("torch._C._autograd._pop_saved_tensors_default_hooks")

# -- the graph

next_sequence_nr: Final[Callable[[], int]] = take("torch._C._autograd._get_sequence_nr")
"""The number that the next node of this thread will have; `node._sequence_nr()` is that of a node."""
current_graph_task: Final[Callable[[], int]] = take("torch._C._current_graph_task_id")
"""A number for the backward that runs in this thread; -1 outside any."""
queue_callback: Final[Callable[[Callable[[], None]], None]] = take(
    "torch.autograd.Variable._execution_engine.queue_callback"
)
"""Register a function to be called when the backward that runs in this thread is over. RuntimeError outside any."""

# An operation with a gradient formula has no identity in Python but the class of its node.
LEAF_NODE: Final[type] = take("torch._C._functions.AccumulateGrad")
CAST_NODE: Final[type] = take("torch._C._functions.ToCopyBackward0")
VIEW_NODES: Final[frozenset[type]] = frozenset(
    take(f"torch._C._functions.{name}Backward0")
    for name in ("T", "Transpose", "Permute", "View", "Select", "Slice", "Split", "SplitWithSizes", "AsStrided")
)

# -- tensors and storages

use_count: Final[Callable[[int], int]] = take("torch._C._storage_Use_Count")
"""How many hold the storage at `_cdata`: each tensor over it, in Python, C++ and graphs, and each object in Python that
is the storage itself, once."""
free_weak_ref: Final[Callable[[Any], None]] = take("torch.UntypedStorage._free_weak_ref")
"""Free a result of `storage._weak_ref()`: until then no other storage gets its address."""
storage_of: Final[Callable[[int], torch.UntypedStorage]] = take("torch.UntypedStorage._new_with_weak_ptr")
"""Return the storage that a `StorageWeakRef` with this `cdata` refers to, if it still exists."""
storage_at: Final[Callable[[int, torch.device, int], torch.UntypedStorage]] = take(
    "torch._C._construct_storage_from_data_pointer"
)
"""Make a storage over bytes at an address, which it does not own."""
neg_view: Final[Callable[[torch.Tensor], torch.Tensor]] = take("torch._neg_view")

# -- torch.compile

eval_frame_callback: Final[Callable[[], Any]] = take("torch._C._dynamo.eval_frame.get_eval_frame_callback")
"""How torch.compile treats the frames of this thread: None: not at all; False: it only runs compiled code; otherwise a
function that compiles."""

# -- CUDA: builds without it have none of these

cuda_current_stream: Final[Callable[[int], int]] = take_or_refuse("torch._C._cuda_getCurrentRawStream")
"""The handle of the current stream of the device of that index; 0 is the default stream."""
cuda_current_device: Final[Callable[[], int]] = take_or_refuse("torch._C._cuda_getDevice")
cuda_is_capturing: Final[Callable[[], bool]] = take_or_refuse("torch._C._cuda_isCurrentStreamCapturing")
cuda_empty_strided: Final[Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]] = take_or_refuse(
    "torch._C._dynamo.guards._empty_strided_cuda"
)
"""As `torch.empty_strided` on the current device, in half the time: what compiled graphs call. Only plain tuples."""

cuda_records_memory: Final[Callable[[], bool]] = take_or_refuse("torch._C._cuda_isHistoryEnabled")
"""Whether a history of allocations is recorded, by whatever caller."""
cuda_record_memory: Final[Callable[..., None]] = take("torch.cuda.memory._record_memory_history")
cuda_memory_snapshot: Final[Callable[[], dict[str, Any]]] = take("torch.cuda.memory._snapshot")
"""The recorded history, and the segments and blocks of the allocator. Never waits for the device."""

cuda_observe_shortages: Final[Callable[[Callable[[int, int, int, int], None]], None]] = take_or_refuse(
    "torch._C._cuda_attach_out_of_memory_observer"
)
"""Have a function called before each `torch.OutOfMemoryError`, for ever, with the index of the GPU and the bytes asked
for, allowed to the process, and free. RuntimeError: the allocator in use has no observers."""

# -- modules

global_forward_hooks: Final[dict[int, Any]] = take("torch.nn.modules.module._global_forward_hooks")
"""Those of `torch.nn.modules.module.register_module_forward_hook`; the dict itself, which changes."""
global_forward_pre_hooks: Final[dict[int, Any]] = take("torch.nn.modules.module._global_forward_pre_hooks")

# -- containers

tree_leaves: Final[Callable[[Any], list[Any]]] = take("torch.utils._pytree.tree_leaves")
"""What nested lists, tuples, dicts and registered classes hold, in order."""

check_attributes(torch.Tensor, "torch.Tensor", TENSOR_ATTRIBUTES)
check_attributes(torch.UntypedStorage, "torch.UntypedStorage", STORAGE_ATTRIBUTES)
check_attributes(LEAF_NODE, "torch.autograd.graph.Node", NODE_ATTRIBUTES)
check_attributes(torch.nn.Module(), "torch.nn.Module()", MODULE_ATTRIBUTES)


def class_behind_fsdp(module: torch.nn.Module) -> type:
    """Return the class of `module`, or the class it had before `fully_shard` derived another from it."""
    from torch.distributed.fsdp import (
        FSDPModule,
    )  # imported here: it takes a second, which a program with such a module has already spent

    own: type = type(module)
    while issubclass(own, FSDPModule):
        bases = own.__bases__
        if len(bases) < 2 or not issubclass(bases[0], FSDPModule):
            raise _import_error("a class of fully_shard's derived from FSDPModule and, behind it, the module's own")
        own = bases[1]
    return own


def of_schedule(schedule: object, name: str) -> Any:
    """Return one of `SCHEDULE_ATTRIBUTES` of a schedule of `torch.distributed.pipelining`.

    Raises:
        ImportError: if this torch's schedules have none of that name.
    """
    check_attributes(schedule, type(schedule).__name__, (name,))
    return getattr(schedule, name)


# -- process groups: builds without torch.distributed have none

default_store: Final[Callable[[], Any]] = take_or_refuse("torch.distributed.distributed_c10d._get_default_store")
"""The store of the rendezvous of the process group; None if it has none, as under MPI."""


def num_collectives() -> int:
    """Count the collectives that this process has begun in all of its process groups, to compare with a later count."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0
    world = take("torch.distributed.distributed_c10d._world")
    return sum(group._get_sequence_number_for_group() for group in world.pg_map)


# -- profiles

record_function: Final[Any] = take("torch._C._profiler._RecordFunctionFast")
"""Like `torch.profiler.record_function`, in a tenth of the time."""
PROFILER_ATTRIBUTES: Final = ("_is_profiler_enabled",)
"""Attributes of `torch.autograd.profiler`: whether one of torch's profilers listens; read on hot paths."""
check_attributes(take("torch.autograd.profiler"), "torch.autograd.profiler", PROFILER_ATTRIBUTES)
