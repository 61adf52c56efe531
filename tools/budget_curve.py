#!/usr/bin/env python3
"""Budgets from the floor to no offload, for a GPT on one device: what is predicted beside what is measured.

    python tools/budget_curve.py                                   16 layers, 8,192 tokens, five budgets
    python tools/budget_curve.py --json curve.jsonl --markdown
    python tools/budget_curve.py --device cpu --layers 4 --hidden 64 --tokens 128 --budgets 2

Each setting runs in a process of its own: no offload, everything offloaded, then the budgets, evenly spread from one to
the other. "Held" is what the driver says that the GPU holds, so nothing else may run there. Without a GPU the bytes of
saved tensors stand for it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tables import print_table
from torch import nn
from torch.nn import functional
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # behind what is installed, which may be compiled

from offload_engine import LowestPeak, OffloadConfig, enable_activation_offloading  # noqa: E402

MIB = 1 << 20
VOCABULARY = 32_000
HEAD_DIM = 128
SETTINGS = ("none", "all")
HEAD = ("setting", "predicted MiB", "held MiB", "reserved", "allocated", "predicted ms", "ms", "over none", "moved MiB")


class Block(nn.Module):
    """A transformer layer: attention of [batch, tokens, hidden] and an MLP."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.num_heads = max(1, hidden // HEAD_DIM)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, hidden = x.shape
        shape = (batch, tokens, 3, self.num_heads, hidden // self.num_heads)
        query, key, value = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, tokens, hidden))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """An embedding, layers, and a head with its loss."""

    def __init__(self, num_layers: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList(Block(hidden) for _ in range(num_layers))
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train with one setting in this process; return what it took."""
    on_gpu = options.device == "cuda"
    torch.manual_seed(0)
    with torch.device(options.device):
        model = Gpt(options.layers, options.hidden).to(torch.bfloat16)
        tokens = torch.randint(VOCABULARY, (1, options.tokens))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu)
    config = _config(options)
    handle = None
    if options.setting != "none" or not on_gpu:
        handle = enable_activation_offloading(model, "none", config=config, layers=list(model.layers))

    def step() -> None:
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    _run(step, options.warmup, on_gpu)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    step_ms = _run(step, options.steps, on_gpu)
    found: dict[str, Any] = {"setting": options.setting, "ms": statistics.median(step_ms), "step_ms": step_ms}
    if on_gpu:
        free, total = torch.cuda.mem_get_info()
        reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
        found |= {"held_bytes": total - free, "reserved_bytes": reserved, "allocated_bytes": allocated}
        found["device"] = torch.cuda.get_device_name()
    if handle is not None:
        found["moved_bytes"] = handle.stats.copied_out_bytes
        found.setdefault("held_bytes", handle.stats.peak_resident_bytes)
        summary = None if handle.engine.budget is None else handle.engine.budget.summary
        if summary is not None:
            found |= {"predicted_bytes": summary.predicted_peak_bytes, "predicted_ms": summary.predicted_step_ms}
        handle.remove()
    return found


def _config(options: argparse.Namespace) -> OffloadConfig:
    if options.setting == "all":
        config = OffloadConfig(policy=LowestPeak())
    elif options.setting == "none":  # without a GPU: counts what is saved
        config = OffloadConfig(dry_run=True)
    else:
        config = OffloadConfig(gpu_budget=int(options.setting))
    return config if options.device == "cuda" else config.replace(min_tensor_bytes=1, directory="none")


def _run(step: Callable[[], None], num_steps: int, on_gpu: bool) -> list[float]:
    step_ms = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize()
        step_ms.append(1e3 * (time.perf_counter() - begin))
    return step_ms


def in_a_process(arguments: Sequence[str], setting: str) -> dict[str, Any]:
    """Measure one setting in a new process.

    Raises:
        RuntimeError: if it failed; has the end of what it printed.
    """
    command = [sys.executable, __file__, *arguments, "--setting", setting]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"setting {setting} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def budgets_between(least: int, most: int, num: int) -> list[int]:
    """Spread budgets evenly, the first a little above the floor, the last a little above no offload."""
    margin = (most - least) // 50
    return [least + margin + (most - least) * i // max(1, num - 1) for i in range(num)]


def row(found: dict[str, Any], none_ms: float) -> tuple[str, ...]:
    """Return a line of the table."""
    setting = found["setting"]
    label = setting if setting in SETTINGS else f"{int(setting) // MIB:,} MiB"
    sizes = [found.get(f"{name}_bytes") for name in ("predicted", "held", "reserved", "allocated", "moved")]
    predicted, held, reserved, allocated, moved = ["" if size is None else f"{size // MIB:,}" for size in sizes]
    predicted_ms = f"{found['predicted_ms']:,.1f}" if "predicted_ms" in found else ""
    times = (predicted_ms, f"{found['ms']:,.1f}", f"{found['ms'] / none_ms:.4f}")
    return label, predicted, held, reserved, allocated, *times, moved


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    if options.setting:
        print(json.dumps(measure(options)), flush=True)
        return 0
    records = []
    with tqdm(total=options.budgets + len(SETTINGS), unit="setting", file=sys.stderr) as bar:
        for setting in SETTINGS:
            records.append(in_a_process(arguments, setting))
            bar.update()
        none, everything = records
        for budget in budgets_between(everything["held_bytes"], none["held_bytes"], options.budgets):
            records.append(in_a_process(arguments, str(budget)))
            bar.update()
    if options.json:
        with options.json.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    lines = [row(record, none["ms"]) for record in records]
    print_table("budgets", HEAD, lines, num_words=1, as_markdown=options.markdown)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="budget_curve.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    for name, default, what in (
        ("layers", 16, "layers of the model"),
        ("hidden", 4096, "hidden size"),
        ("tokens", 8192, "tokens of the one sequence of a step"),
        ("budgets", 5, "budgets from everything offloaded to no offload"),
        ("warmup", 10, "steps before the timed ones, in which a budget is measured and verified"),
        ("steps", 10, "timed steps"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default {default})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one JSON object a setting")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--setting", help=argparse.SUPPRESS)  # of a process that measures
    return parser


if __name__ == "__main__":
    sys.exit(main())
