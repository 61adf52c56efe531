# SPDX-License-Identifier: Apache-2.0
"""Wires the parts of the benchmark together."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.frontends.settings import Shape
from benchmarks.gpu.provenance import provenance

from .report import plot, print_length
from .settings import Settings, parse

_PACKAGES = ("torch", "transformers")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    settings = parse(arguments)
    if settings.draw:
        assert settings.plot is not None
        plot(json.loads(settings.draw.read_text())["lengths"], settings.plot)
        return 0
    import torch  # only now: mistakes are told at once

    if settings.device == "cuda" and not torch.cuda.is_available():
        print(
            "benchmarks/run.py budget_curve needs a GPU; --device cpu --tiny tries the program without one",
            file=sys.stderr,
        )
        return 2
    return _Run(settings).execute()


class _Run:
    """All settings at all lengths in one process; the results are written after each turn."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._begin = time.perf_counter()
        name = _device_name(settings)
        self._found: dict[str, Any] = {"run": {**provenance(_PACKAGES), "device": name}, "lengths": []}

    def execute(self) -> int:
        for index, shape in enumerate(self._settings.shapes):
            left = self._settings.seconds - (time.perf_counter() - self._begin)
            self._measure(shape, time.perf_counter() + left / (len(self._settings.shapes) - index))
        self._found["run"]["seconds"] = time.perf_counter() - self._begin
        self._write()
        for length in self._found["lengths"]:
            print_length(length, self._settings.markdown)
        if self._settings.plot:
            plot(self._found["lengths"], self._settings.plot)
        budgets = [turn for length in self._found["lengths"] for turn in length["turns"] if turn["budget_bytes"]]
        return int(any(turn["failure"] for turn in budgets))

    def _measure(self, shape: Shape, deadline: float) -> None:
        from tqdm import tqdm

        from .by_hand import FIRST, budget, settings_by_hand
        from .measure import TrainedWorkload, Turns

        settings = self._settings
        workload = TrainedWorkload(shape, settings.device)
        turns = Turns(workload, settings.warmup, settings.iters)
        by_hand = settings_by_hand(settings.device, workload)
        length: dict[str, Any] = {"seq": shape.seq, "layers": shape.layers, "turns": [], "left_out": []}
        self._found["lengths"].append(length)
        with tqdm(total=len(by_hand) + settings.budgets, unit="turn", desc=f"{shape.seq:,} tokens") as bar:

            def take(name: str, nbytes: int | None) -> dict[str, Any]:
                bar.set_postfix_str(name)
                attach = by_hand[name] if nbytes is None else budget(settings.device, nbytes)
                # What a failure leaves behind would count as memory of the next one.
                is_over = time.perf_counter() > deadline or any(turn["failure"] for turn in length["turns"])
                found = {"failure": "left out"} if is_over else turns.run(name, attach, nbytes)
                length["left_out" if is_over else "turns"].append(name if is_over else found)
                self._write()
                bar.update()
                return found

            ends = [take(name, None) for name in FIRST]
            rest = [(name, None) for name in by_hand if name not in FIRST]
            budgets = []
            if not any(end["failure"] for end in ends):
                none, everything = (end["held_bytes"] for end in ends)
                sizes = budgets_between(everything, none, settings.budgets)
                budgets = [(f"budget {nbytes >> 20:,} MiB", nbytes) for nbytes in sizes]
            for name, nbytes in alternately(budgets, rest):
                take(name, nbytes)

    def _write(self) -> None:
        file: Path | None = self._settings.json
        if file:
            file.write_text(json.dumps(self._found, indent=1) + "\n")


def budgets_between(least: int, most: int, num: int) -> list[int]:
    """Spread budgets evenly, the first a little above the floor, the last a little above no offload."""
    margin = (most - least) // 50
    return [least + margin + (most - least) * i // max(1, num - 1) for i in range(num)]


def alternately(one: Sequence[Any], other: Sequence[Any]) -> list[Any]:
    """Mix two lists evenly, so that both see the same drift of the machine."""
    places = [(index / max(1, len(each)), each[index]) for each in (one, other) for index in range(len(each))]
    return [item for _, item in sorted(places, key=lambda place: place[0])]


def _device_name(settings: Settings) -> str:
    import torch

    return torch.cuda.get_device_name() if settings.device == "cuda" else "CPU"
