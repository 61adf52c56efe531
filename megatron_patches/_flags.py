# SPDX-License-Identifier: Apache-2.0
"""Lists the settings: each is a field of TransformerConfig and a flag."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Optional

from megatron_patches._model.thresholds import thresholds_flag
from offload_engine.config import HOST_POLICIES
from offload_engine.sizes import bytes_flag, parse_size


class Setting(NamedTuple):
    """One new field of TransformerConfig, and its flag."""

    name: str
    type: Any  # typing.Optional and not "| None": megatron reads it to make the flag
    default: Any
    help: str
    parse: Callable[[str], Any] | None = None  # None: a switch
    choices: tuple[str, ...] | None = None

    @property
    def flag(self) -> str:
        name = self.name.replace("_", "-")
        return f"--no-{name}" if self.default is True else f"--{name}"

    def argparse_kwargs(self) -> dict[str, Any]:
        switch = "store_false" if self.default is True else "store_true"
        how: dict[str, Any] = {"action": switch} if self.parse is None else {"type": self.parse}
        if self.choices is not None:
            how["choices"] = self.choices
        elif self.parse is not None:
            how["metavar"] = _METAVARS[self.parse]
        return {"dest": self.name, "default": self.default, "help": self.help, **how}

    def definition(self) -> tuple[str, Any, Any]:
        metadata = {"argparse_meta": self.argparse_kwargs()}
        return self.name, self.type, dataclasses.field(default=self.default, metadata=metadata)


RECOMPUTE = ("auto", "off")
_size = bytes_flag()


def _budget(text: str) -> str:
    """Check a size that may be a share or "auto"; it stays text, because the total is not known yet."""
    try:
        return str(parse_size(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _fraction(text: str) -> float:
    with suppress(ValueError):
        if 0 <= float(text) <= 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a share: give a number from 0 to 1")


def _count(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of layers: give at least 1")


_METAVARS: dict[Callable[[str], Any], str] = {
    **{_size: "SIZE", _budget: "SIZE", thresholds_flag: "SIZE", _fraction: "SHARE", _count: "N", str: "PATH"},
}
# Sizes default to None, which stands for the value in `apply(config=...)` or, without one, for OffloadConfig's default.
_AS_SIZES = " (a size, such as 64MiB)"
_SIZE = Optional[int]  # noqa: UP045
_TEXT = Optional[str]  # noqa: UP045
_NUMBER = Optional[float]  # noqa: UP045
_COUNT = Optional[int]  # noqa: UP045
SETTINGS = (
    Setting("offload_activation", bool, False, "Move the saved activations of --offload-modules to host memory."),
    Setting(
        "offload_engine",
        bool,
        False,
        "Run megatron-core's own offload settings with this engine: --fine-grained-activation-offloading and its "
        "flags, or --cpu-offloading-num-layers. The log says how each was translated.",
    ),
    Setting(
        "offload_min_tensor_bytes",
        _TEXT,
        None,
        f"Saved tensors smaller than this stay on the device{_AS_SIZES}; NAME=SIZE for those of one of "
        "--offload-modules, several with commas: 1MiB,moe_act=350MB. Default: 1 MiB.",
        thresholds_flag,
    ),
    Setting(
        "offload_fraction",
        _NUMBER,
        None,
        "Share of the saved bytes of each model chunk, in the order of its forward, that may leave, from 0 to 1; the "
        "rest stays. From the second step on. Default: 1.",
        _fraction,
    ),
    Setting(
        "offload_rank_delta_bytes",
        _SIZE,
        None,
        f"Pipeline rank r keeps at least r times this many saved bytes on the device{_AS_SIZES}: later ranks hold "
        "fewer microbatches, and have room. From the second step on. Default: 0.",
        _size,
    ),
    Setting(
        "offload_num_layers",
        _COUNT,
        None,
        "Offload only this many layers of each model chunk, from the first on: all names that they have unless "
        "--offload-modules names some. Default: all layers.",
        _count,
    ),
    Setting(
        "offload_host_limit_bytes",
        _SIZE,
        None,
        f"Upper bound on host memory of each process{_AS_SIZES}. Default: four fifths of the free memory, in equal "
        "shares for the processes of a node.",
        _size,
    ),
    Setting(
        "offload_host_policy",
        _TEXT,
        None,
        "A group without room below that bound stays on the device (keep) or ends the step (error). Default: keep.",
        str,
        HOST_POLICIES,
    ),
    Setting(
        "offload_horizon_bytes",
        _SIZE,
        None,
        f"How many bytes may be copied back to the device ahead of their use{_AS_SIZES}. Default: twice the "
        "largest group.",
        _size,
    ),
    Setting(
        "offload_resident_bytes",
        _SIZE,
        None,
        f"A budget: how many saved bytes of the modules may be on the device at once{_AS_SIZES}; what fits stays. "
        "Without it everything leaves as soon as it can. Not with --offload-horizon-bytes or "
        "--offload-max-inflight-bytes. Default: none.",
        _size,
    ),
    Setting(
        "offload_max_inflight_bytes",
        _SIZE,
        None,
        f"How many bytes may be on their way to host memory before compute waits{_AS_SIZES}. If the link is the "
        "bottleneck, a larger one makes steps shorter and the peak higher. Default: twice the largest group, or less.",
        _size,
    ),
    Setting(
        "offload_gpu_budget",
        _TEXT,
        None,
        "What the process may hold on its GPU, CUDA context included (a size, such as 60GiB, a share as 90%%, or auto, "
        "which is all of it, less a margin). The engine measures a few steps and keeps what fits; the rest moves. It "
        "switches the offload on, of all names that the model has unless --offload-modules names some. Not with "
        "--offload-resident-bytes, --offload-horizon-bytes or --offload-max-inflight-bytes. Without a GPU: bytes of "
        "saved tensors in groups. Default: none.",
        _budget,
    ),
    Setting(
        "offload_plan",
        _TEXT,
        None,
        "With --offload-gpu-budget: begin with the plan in this file, if there is one, and write to it what is "
        "decided. {rank} in the name is replaced; without it, and with several ranks, each adds its number. "
        "Default: none.",
        str,
    ),
    Setting(
        "offload_plan_plot",
        _TEXT,
        None,
        "With --offload-gpu-budget: draw what each budget would take in this file, with what was chosen and what rank "
        "0 measured. Default: none.",
        str,
    ),
    Setting(
        "offload_recompute",
        _TEXT,
        None,
        "With --offload-gpu-budget: layers may recompute what costs less to compute again than to move, chosen layer "
        "by layer (auto), or recompute only what the other flags say (off). Default: auto.",
        str,
        RECOMPUTE,
    ),
    Setting(
        "offload_planned",
        bool,
        False,
        "Plan the moves of each step ahead, by the schedule and the sizes that the step before has shown, instead of "
        "deciding at each boundary.",
    ),
    Setting(
        "offload_dir",
        _TEXT,
        None,
        "Without a GPU: directory of the host tier's file, 'none' for plain memory. Default: a temporary directory.",
        str,
    ),
    Setting(
        "offload_trace",
        _TEXT,
        None,
        "Record the second training step of each rank in this file, a Chrome trace for Perfetto and for "
        "`python -m offload_engine.report`. {rank} and {step} in the name are replaced. Default: none.",
        str,
    ),
    Setting(
        "offload_report",
        bool,
        True,
        "Log no table of the second training step, and do not record that step for the table.",
    ),
    Setting(
        "offload_cpu_affinity",
        bool,
        False,
        "Bind each process to the CPUs of its GPU's memory node, before it pins host memory.",
    ),
    Setting("offload_dry_run", bool, False, "Move nothing, and count what would be moved."),
)
BOUNDS = ("resident_bytes", "horizon_bytes", "max_inflight_bytes")  # each selects a policy, see `policy_for`
SIZES = tuple(s.name for s in SETTINGS if s.parse is _size)
SWITCHES = tuple(s.name for s in SETTINGS if s.parse is None)
