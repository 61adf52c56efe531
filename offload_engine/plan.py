# SPDX-License-Identifier: Apache-2.0
"""Predicts what training a Hugging Face model would take, without a GPU.

python -m offload_engine.plan qwen2 --set num_hidden_layers=28 hidden_size=3584 --seq-length 32768 --hardware h200
python -m offload_engine.plan path/to/config.json --seq-length 8192 --hardware h100x8

A name is a model type of transformers ("llama", "qwen2", "mixtral"), with the defaults of its configuration; a path is
a config.json, or a folder with one. Nothing is downloaded, and no weights are made.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from offload_engine.output import write_out
from offload_engine.planning.hardware import Hardware
from offload_engine.rehearsal.failures import RehearsalError
from offload_engine.rehearsal.forecast import Forecast
from offload_engine.rehearsal.model import NUM_WAYS, ModelRehearsal
from offload_engine.rehearsal.options import add_hardware_options, budget_on, hardware_of, positive
from offload_engine.rehearsal.progress import Progress
from offload_engine.rehearsal.recorded import forecast_at_recorded_speed
from offload_engine.rehearsal.tables import draw_forecast, forecast_text

_NOTES = (
    "Each GPU has a whole replica, in bfloat16, with its gradients and optimizer state. Fullest GPU: allocated bytes, "
    "what the allocator reserves in vain, and 0.7 GiB of CUDA.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        _answer(options)
    except (RehearsalError, ValueError, OSError, ImportError, TypeError) as error:
        sys.stderr.write(f"python -m offload_engine.plan: {' '.join(str(error).split())}\n")
        return 1
    return 0


def _answer(options: argparse.Namespace) -> None:
    hardware = hardware_of(options.hardware, options.hardware_file, options.recording)
    config = read_config(options.model, dict(options.set))
    with Progress(NUM_WAYS * (2 if options.recording else 1), sys.stderr) as progress:

        def make(machine: Hardware) -> Forecast:
            return _forecast(options, config, machine, progress)

        forecast, notes = forecast_at_recorded_speed(make, hardware, options.recording)
    write_out(forecast_text(forecast, (*notes, *_NOTES)))
    if options.plan_plot:
        draw_forecast(forecast, options.plan_plot)


def _forecast(options: argparse.Namespace, config: Any, hardware: Hardware, progress: Progress) -> Forecast:
    rehearsal = ModelRehearsal(
        lambda: _make_model(config),
        lambda model: _loss(model, options.batch_size, options.seq_length),
        hardware,
        hardware.num_gpus * options.nodes,
        options.optimizer_bytes,
        budget_on(hardware, options.budget),
    )
    num_tokens = options.batch_size * options.seq_length
    return rehearsal.forecast(num_tokens, progress.advance, has_curve=bool(options.plan_plot))


def read_config(model: str, changes: dict[str, Any]) -> Any:
    """Return the configuration of a model type, or of a file, with changes.

    Raises:
        ValueError: if it is neither, or has no such setting.
        ImportError: without transformers.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if os.path.exists(model):
        config: Any = AutoConfig.from_pretrained(model, local_files_only=True)
    elif model in CONFIG_MAPPING_NAMES:
        config = AutoConfig.for_model(model)
    else:
        raise ValueError(
            f"{model!r} is neither a config.json here nor a model type that transformers knows, such as llama or qwen2"
        )
    for name, value in changes.items():
        if not hasattr(config, name):
            raise ValueError(f"--set {name}: the configuration of {config.model_type} has no such setting")
        setattr(config, name, value)
    config.use_cache = False
    # Now: where the first import of a model's code is in a rehearsal, transformers 4 does not find its classes.
    importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    return config


def _make_model(config: Any) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.train()


def _loss(model: Any, batch_size: int, seq_length: int) -> torch.Tensor:
    tokens = torch.zeros((batch_size, seq_length), dtype=torch.int64)
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m offload_engine.plan",
        description="Predicts what training a Hugging Face model would take, without a GPU.",
    )
    parser.add_argument("model", help="a model type (qwen2), or a config.json or its folder")
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        type=_assignment,
        metavar="NAME=VALUE",
        help="settings of the configuration (default: none)",
    )
    parser.add_argument(
        "--seq-length", type=positive, default=4096, metavar="N", help="tokens of a sequence (default: %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=positive, default=1, metavar="N", help="sequences per GPU (default: %(default)s)"
    )
    parser.add_argument(
        "--optimizer-bytes",
        type=_not_negative,
        default=8,
        metavar="N",
        help="bytes of its state for each parameter; 8: AdamW in float32, 4: in bfloat16, 0: none (default: "
        "%(default)s)",
    )
    add_hardware_options(parser)
    return parser


def _not_negative(text: str) -> int:
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, 0 or more")


def _assignment(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not (name and separator and value):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


if __name__ == "__main__":
    sys.exit(main())
