# SPDX-License-Identifier: Apache-2.0
"""Defines options that the commands of a forecast share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from offload_engine.planning.hardware import Hardware, find_hardware
from offload_engine.rehearsal.recorded import recorded_machine
from offload_engine.sizes import Size, parse_size


def add_hardware_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the machine and the plot."""
    group = parser.add_argument_group("machine that is planned for")
    group.add_argument(
        "--hardware",
        default="h200",
        metavar="NAME",
        help="GPUs of a host: h200x8 is eight H200; offload_engine/planning/hardware.toml lists them (default: "
        "%(default)s)",
    )
    group.add_argument(
        "--hardware-file", metavar="FILE", help="a table like that, with machines of your own (default: none)"
    )
    group.add_argument(
        "--recording",
        nargs="+",
        default=[],
        metavar="FILE",
        help="recorded steps of an earlier run (--offload-trace), for its link and the memory of its GPU, and, if they "
        "are of the same job, how fast it computes; the rest is that of --hardware (default: none)",
    )
    group.add_argument("--nodes", type=positive, default=1, metavar="N", help="number of hosts (default: %(default)s)")
    group.add_argument(
        "--budget",
        type=_size,
        default=Size(),
        metavar="SIZE",
        help="what a process may hold on its GPU: 60GiB, 90%% or auto, which is all of it (default: auto)",
    )
    group.add_argument(
        "--plan-plot",
        type=_picture,
        metavar="FILE",
        help="draw throughput over memory in this file, a curve of budgets beside the ways to train (default: none)",
    )


def hardware_flags_in(args: argparse.Namespace) -> list[str]:
    """Return the names of these flags that were given."""
    parser = argparse.ArgumentParser(add_help=False)
    add_hardware_options(parser)
    defaults = vars(parser.parse_args([]))
    return [f"--{name.replace('_', '-')}" for name, value in defaults.items() if getattr(args, name) != value]


def hardware_of(name: str, file: str | None, recordings: Sequence[str]) -> Hardware:
    """Return the machine that the options name.

    Raises:
        ValueError: if it is unknown, a file cannot be read, or a recording has no copies both ways; names the flag.
    """
    with _naming("--hardware", "--hardware-file"):
        hardware = find_hardware(name, file)
    with _naming("--recording", "--recording"):
        return recorded_machine(hardware, recordings) if recordings else hardware


@contextmanager
def _naming(flag: str, flag_of_file: str) -> Iterator[None]:
    """Put the flag in front of a mistake, and say which file cannot be read."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None
    except OSError as error:
        raise ValueError(f"{flag_of_file} {error.filename} cannot be read: {error.strerror}") from None


def budget_on(hardware: Hardware, budget: Size) -> int:
    """Return `--budget` in bytes.

    Raises:
        ValueError: if a GPU of this machine has less memory.
    """
    nbytes = budget.resolve(hardware.gpu_bytes)
    if nbytes > hardware.gpu_bytes:
        raise ValueError(f"--budget {budget} is above the {hardware.gpu_gib:g} GiB of a GPU of {hardware.name}")
    return nbytes


def _size(text: str) -> Size:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _picture(text: str) -> str:
    """Check early that a picture can be written there, because the forecast before it may take minutes."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise argparse.ArgumentTypeError(f"{text!r} needs matplotlib: install it, or omit the flag") from None
    kind, known = os.path.splitext(text)[1][1:].lower(), FigureCanvasBase.get_supported_filetypes()
    if kind and kind not in known:
        raise argparse.ArgumentTypeError(f"{text!r} ends in none of {', '.join(known)}")
    is_new = not os.path.exists(text)
    try:
        with open(text, "ab"):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {error.strerror}") from None
    if is_new:
        os.remove(text)
    return text


def positive(text: str) -> int:
    """Parse a flag that is a count, for argparse."""
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
