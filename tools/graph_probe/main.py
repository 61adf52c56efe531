"""The command line of the probe: parts in processes of their own, and a table of what they found."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PARTS: dict[str, dict[str, Any]] = {
    "bits": {"how": "bits", "small": True},
    "beside": {"how": "beside"},
    "facts": {"how": "facts"},
    "dump": {"how": "whole", "captured": True, "part": "qkv", "small": True, "exact": True, "rounds": 2},
    "eager mlp 1g": {"how": "whole", "part": "mlp", "policy": "1g"},
    "graph mlp 1g": {"how": "whole", "captured": True, "part": "mlp", "policy": "1g"},
    "eager": {"how": "whole"},
    "graph": {"how": "whole", "captured": True},
    "graph qkv": {"how": "whole", "captured": True, "part": "qkv"},
    "graph mlp": {"how": "whole", "captured": True, "part": "mlp"},
    "eager qkv": {"how": "whole", "part": "qkv"},
    "eager mlp": {"how": "whole", "part": "mlp"},
    "layers mlp": {"how": "layers", "part": "mlp"},
    "graph mlp planned": {"how": "whole", "captured": True, "part": "mlp", "policy": "planned"},
    "eager mlp planned": {"how": "whole", "part": "mlp", "policy": "planned"},
    "layers qkv": {"how": "layers", "part": "qkv"},
    "layers": {"how": "layers"},
    "refusals": {"how": "refusals", "small": True},
    "calls": {"how": "calls"},
    "graph layer": {"how": "whole", "captured": True, "part": "layer", "policy": "layers", "per_microbatch": True},
    "eager layer": {"how": "whole", "part": "layer", "policy": "layers", "per_microbatch": True},
}
"""By importance: what the time does not suffice for is left out."""

SMALL = {"layers": 3, "hidden": 1024, "ffn": 4096, "heads": 8, "seq": 2048, "microbatches": 3}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts, or one of them in this process."""
    options = _parser().parse_args(arguments)
    if options.run:
        return _run(options)
    deadline = time.monotonic() + options.seconds
    for part in options.only or PARTS:
        left = deadline - time.monotonic()
        if left < options.least:
            _append(options.json, {"part": part, "stage": "left out", "seconds_left": round(left)})
            continue
        _start(part, options, min(left, options.part_seconds))
    print(table(options.json))
    return 0


def _start(part: str, options: argparse.Namespace, seconds: float) -> None:
    command = [sys.executable, *(["-W", "ignore"]), sys.argv[0], "--run", part, "--json", str(options.json)]
    command += [f"--{name}={getattr(options, name)}" for name in ("rounds", "seq", "depth")]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command, timeout=seconds, capture_output=True, text=True, errors="replace", env=environment
        )
        end: dict[str, Any] = {"status": done.returncode, "stderr": done.stderr[-3000:], "stdout": done.stdout[-500:]}
    except subprocess.TimeoutExpired as expired:
        text = expired.stderr or b""
        end = {
            "status": "timed out",
            "stderr": (text if isinstance(text, str) else text.decode(errors="replace"))[-3000:],
        }
    _append(options.json, {"part": part, "stage": "end", "wall_s": round(time.monotonic() - begin, 1), **end})
    print(f"{part}: {end['status']}", flush=True)


def _run(options: argparse.Namespace) -> int:
    part, settings = options.run, PARTS[options.run]

    def emit(**found: Any) -> None:
        _append(options.json, {"part": part, **found})

    try:
        _call(settings, options, emit)
    except BaseException:
        emit(stage="failed", traceback=traceback.format_exc()[-6000:])
        return 1
    return 0


def _call(settings: dict[str, Any], options: argparse.Namespace, emit: Any) -> None:
    from graph_probe.beside import run_beside
    from graph_probe.bits import run_bits
    from graph_probe.calls import run_calls
    from graph_probe.facts import run_facts
    from graph_probe.layers import run_layers
    from graph_probe.stage import Shape
    from graph_probe.whole import run_refusals, run_whole

    if settings["how"] in ("facts", "calls"):
        (run_facts if settings["how"] == "facts" else run_calls)(emit)
        return
    shape = (
        Shape(**SMALL, depth=options.depth) if settings.get("small") else Shape(seq=options.seq, depth=options.depth)
    )
    rounds = settings.get("rounds", options.rounds)
    if settings["how"] == "refusals":
        run_refusals(shape, emit)
        return
    if settings["how"] == "bits":
        run_bits(shape, emit)
        return
    if settings["how"] == "beside":
        run_beside(shape, 2 * options.rounds, emit)
        return
    if settings["how"] == "layers":
        run_layers(shape, settings.get("part"), rounds, emit)
        return
    dump = str(options.json.with_name("graph.json.gz")) if settings.get("small") else None
    run_whole(
        shape,
        settings.get("part"),
        bool(settings.get("captured")),
        settings.get("policy", "lowest"),
        rounds,
        emit,
        per_microbatch=settings.get("per_microbatch", False),
        exact=settings.get("exact", False),
        dump=dump,
    )


def table(path: Path) -> str:
    """Return what the parts found, a line each; bits are compared with those of the first step of the same part."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [f"{'part':34} {'bits':>7} {'step ms':>9} {'over none':>9} {'host ms':>9} {'reserved MiB':>13}  end"]
    for part in dict.fromkeys(row["part"] for row in rows):
        own = [row for row in rows if row["part"] == part]
        expected = next((row["bits"] for row in own if "bits" in row), None)
        end = next((row.get("status") for row in own if row["stage"] == "end"), "left out")
        for of in dict.fromkeys(row["of"] for row in own if "of" in row) or [""]:
            lines.append(_line(f"{part} {of}".strip(), [r for r in own if r.get("of", "") == of], expected, end))
    return "\n".join(lines)


def _line(name: str, rows: list[dict[str, Any]], expected: Any, end: Any) -> str:
    bits = [row["bits"] == expected for row in rows if "bits" in row]
    equal = f"{sum(bits)}/{len(bits)}" if bits else ""
    times = next((row for row in rows if "step_ms" in row), {})
    # Of a graph, what is reserved after its capture: to compare the bits takes memory too.
    names = ("captured_peak_reserved_mib", "eager_peak_reserved_mib")
    reserved = next((row[name] for row in rows for name in names if name in row), "")
    values = (times.get("step_ms", ""), times.get("over_none", ""), times.get("host_ms", ""))
    return f"{name:34} {equal:>7} {values[0]:>9} {values[1]:>9} {values[2]:>9} {reserved:>13}  {end}"


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="JSON lines, appended at once")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="this part; may be repeated")
    parser.add_argument("--run", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=225.0, help="of all parts (default: %(default)s)")
    parser.add_argument("--part-seconds", type=float, default=45.0, help="of one part (default: %(default)s)")
    parser.add_argument("--least", type=float, default=9.0, help="no part begins with less left (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="steps that are timed (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=8192, help="tokens of a microbatch (default: %(default)s)")
    parser.add_argument(
        "--depth", type=int, default=2, help="forwards before the first backward (default: %(default)s)"
    )
    return parser
