# SPDX-License-Identifier: Apache-2.0
"""Reads a captured graph: its nodes, its edges, and the memory that they use."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from typing import Any

import torch

from tests.graph_order import Edge, Node

TYPES = {0: "kernel", 1: "memcpy", 2: "memset", 3: "host", 4: "graph", 5: "empty", 6: "wait", 7: "record"}
_HANDLE = ctypes.c_void_p
_LARGEST_PARAMETER = 1 << 16
_LOWEST_ADDRESS = 1 << 32


def nodes_and_edges(graph: int) -> tuple[list[Node], list[Edge]]:
    """Return what `check` takes; each pointer among the parameters of a kernel is a use of that address.

    Args:
        graph: a `cudaGraph_t`.
    """
    runtime, driver = _runtime(), ctypes.CDLL("libcuda.so.1")
    handles = _nodes(runtime, graph)
    edges = _edges(runtime, graph, {handle: i for i, handle in enumerate(handles)})
    spans = [(s["address"], s["address"] + s["total_size"]) for s in torch.cuda.memory_snapshot()]
    nodes = [_node(runtime, driver, handle, spans) for handle in handles]
    for node in nodes:
        _place(node, spans)
    return nodes, edges


def _runtime() -> Any:
    process = ctypes.CDLL(None)
    if hasattr(process, "cudaGraphGetNodes"):
        return process
    return ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")


def _check(code: int, call: str) -> None:
    if code != 0:
        raise RuntimeError(f"{call}: error {code}")


def _nodes(runtime: Any, graph: int) -> list[int]:
    count = ctypes.c_size_t()
    _check(runtime.cudaGraphGetNodes(_HANDLE(graph), None, ctypes.byref(count)), "cudaGraphGetNodes")
    found = (_HANDLE * count.value)()
    _check(runtime.cudaGraphGetNodes(_HANDLE(graph), found, ctypes.byref(count)), "cudaGraphGetNodes")
    return [handle or 0 for handle in found]


def _edges(runtime: Any, graph: int, index: dict[int, int]) -> list[Edge]:
    count = ctypes.c_size_t()
    _check(runtime.cudaGraphGetEdges(_HANDLE(graph), None, None, None, ctypes.byref(count)), "cudaGraphGetEdges")
    sources, targets = (_HANDLE * count.value)(), (_HANDLE * count.value)()
    data = (ctypes.c_ubyte * (8 * count.value))()
    code = runtime.cudaGraphGetEdges(_HANDLE(graph), sources, targets, data, ctypes.byref(count))
    _check(code, "cudaGraphGetEdges")
    return [(index[source], index[target]) for source, target in zip(sources, targets, strict=True)]


def _place(node: Node, spans: list[tuple[int, int]]) -> None:
    """Tell of a copy which side is on the device, whatever kind CUDA says it is of."""
    if node["type"] != "memcpy":
        return
    source, target, nbytes = node["source"], node["target"], node["nbytes"]
    is_from, is_to = _is_in(spans, source), _is_in(spans, target)
    if is_from is not is_to:
        device, host = (source, target) if is_from else (target, source)
        node["kind"] = "out" if is_from else "in"
        node["host"], node["device"] = [host, host + nbytes], [device, device + nbytes]


def _is_in(spans: list[tuple[int, int]], address: int) -> bool:
    return any(begin <= address < end for begin, end in spans)


def _node(runtime: Any, driver: Any, handle: int, spans: list[tuple[int, int]]) -> Node:
    number = ctypes.c_int()
    _check(runtime.cudaGraphNodeGetType(_HANDLE(handle), ctypes.byref(number)), "cudaGraphNodeGetType")
    kind = TYPES.get(number.value, str(number.value))
    if kind == "memcpy":
        return {"type": kind, **_copy(runtime, handle)}
    if kind == "memset":
        return {"type": kind, "addresses": [_target(runtime, handle)]}
    if kind == "kernel":
        return {"type": kind, "addresses": _addresses(driver, handle, spans)}
    return {"type": kind}


def _copy(runtime: Any, handle: int) -> Node:
    """Return what a copy moves."""
    raw = (ctypes.c_ubyte * 160)()  # cudaMemcpy3DParms
    _check(runtime.cudaGraphMemcpyNodeGetParams(_HANDLE(handle), raw), "cudaGraphMemcpyNodeGetParams")
    data = bytes(raw)
    source, target = struct.unpack_from("Q", data, 32)[0], struct.unpack_from("Q", data, 96)[0]
    width, height, depth = struct.unpack_from("QQQ", data, 128)
    return {"nbytes": width * max(1, height) * max(1, depth), "source": source, "target": target}


def _target(runtime: Any, handle: int) -> int:
    """Return the first byte that a memset writes."""
    raw = (ctypes.c_ubyte * 64)()  # cudaMemsetParams
    _check(runtime.cudaGraphMemsetNodeGetParams(_HANDLE(handle), raw), "cudaGraphMemsetNodeGetParams")
    target: int = struct.unpack_from("Q", bytes(raw), 0)[0]
    return target


def _addresses(driver: Any, handle: int, spans: list[tuple[int, int]]) -> list[int]:
    """Return what of a kernel's parameters is in torch's memory; of matrix products on Hopper a tensor map hides it."""
    raw = (ctypes.c_ubyte * 80)()  # CUDA_KERNEL_NODE_PARAMS_v2
    _check(driver.cuGraphKernelNodeGetParams_v2(_HANDLE(handle), raw), "cuGraphKernelNodeGetParams_v2")
    function = struct.unpack_from("Q", bytes(raw), 0)[0]
    parameters, kern = struct.unpack_from("Q", bytes(raw), 40)[0], struct.unpack_from("Q", bytes(raw), 56)[0]
    info, what = (driver.cuFuncGetParamInfo, function) if function else (driver.cuKernelGetParamInfo, kern)
    words = {word for value in _values(info, what, parameters) for word in _words(value)}
    return sorted(word for word in words if _is_in(spans, word))


def _words(value: bytes) -> Iterator[int]:
    """Yield each aligned word that may be an address."""
    for at in range(0, len(value) - 7, 8):
        word = struct.unpack_from("Q", value, at)[0]
        if _LOWEST_ADDRESS <= word < 1 << 48:
            yield word


def _values(info: Any, what: int, parameters: int) -> Iterator[bytes]:
    """Yield the parameters of a kernel that may hold an address."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    number = 0
    while info(_HANDLE(what), ctypes.c_size_t(number), ctypes.byref(offset), ctypes.byref(size)) == 0:
        if parameters and 8 <= size.value <= _LARGEST_PARAMETER:
            pointer = ctypes.cast(parameters, ctypes.POINTER(_HANDLE))[number]
            yield ctypes.string_at(pointer or 0, size.value)
        number += 1
