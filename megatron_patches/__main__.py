# SPDX-License-Identifier: Apache-2.0
"""Runs a stock Megatron-LM script with offload: `python -m megatron_patches [flags] pretrain_gpt.py ARGS`."""

from __future__ import annotations

import argparse
import logging
import os
import runpy
import shutil
import sys
import warnings
from collections.abc import Sequence

import torch

from megatron_patches import add_offload_arguments, apply_cpu_support, offload_config_from_args
from megatron_patches._arguments import DEFAULT_MODULES, Settings, part_settings, split_flags
from megatron_patches._command_line import OneLineParser, end_run
from megatron_patches._handle import Handle, apply_settings
from megatron_patches._model.modules import MODULES, Span, canonical_names
from megatron_patches._plan_files import is_one_of_several
from megatron_patches._rows.registry import Applied, PatchError
from megatron_patches._runtime import ModelRuntime
from megatron_patches._take_over import TakeOver
from megatron_patches._versions import installed_version
from offload_engine import OffloadConfig, OffloadError
from offload_engine.output import write_out
from offload_engine.rehearsal.options import add_hardware_options, hardware_flags_in
from offload_engine.sizes import parse_size

logger = logging.getLogger("megatron_patches")

PROGRAM = "python -m megatron_patches"
TABLE_COLUMNS = 120  # the paths of submodules need this width


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags before the script, apply the patches and run the script as `__main__`."""
    typed = sys.argv[1:] if argv is None else argv
    own, script = split_flags(typed)
    parser = _make_parser()
    args = parser.parse_args(own)
    if args.list_modules:
        write_out(f"{module_table()}\n")
        return
    if args.check is not None:
        sys.exit(_check(args.check))
    if not script:
        parser.error("no script given: name the Megatron-LM script to run, for instance pretrain_gpt.py")
    if not os.path.isfile(script[0]):
        parser.error(f"there is no script {script[0]!r}")
    if not args.plan and (given := hardware_flags_in(args)):
        parser.error(f"{', '.join(given)} without --plan changes nothing: give both, or neither")
    # As `python script.py ARGS` would, and before megatron-core is imported: the script's folder may have its own.
    sys.path.insert(0, os.path.dirname(os.path.abspath(script[0])))
    if args.plan:
        _plan(parser, args, script)
        return
    _log_to_stderr()
    handle, cpu_support = _apply(parser, args)
    try:
        _run(script)
    except Exception as error:
        if error is not handle.mistake:
            raise
        end_run(PROGRAM, str(error), words=typed)
    finally:
        _remove(handle, cpu_support, sys.exc_info()[1])


def module_table() -> str:
    """Return the table of module names as text, drawn with rich if it is installed."""
    columns = ("name", "what is moved", "submodules of a layer", "not with --recompute-modules")
    rows = [
        (
            "\n".join((row.name, *row.aliases)),
            row.saves,
            "\n".join(_submodule(span) for span in row.spans),
            ", ".join(name for name in (*row.recomputed_by, *row.discarded_by) if name not in row.input_of),
        )
        for row in MODULES
    ]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return "\n".join("  ".join(cells).replace("\n", ", ") for cells in (columns, *rows))
    table = Table(show_lines=True)
    for column, fixed in zip(columns, (True, False, True, False), strict=True):
        table.add_column(column, no_wrap=fixed)
    for cells in rows:
        table.add_row(*cells)
    console = Console(width=max(shutil.get_terminal_size().columns, TABLE_COLUMNS))
    with console.capture() as capture:
        console.print(table, markup=False)
    return capture.get().rstrip()


def _submodule(span: Span) -> str:
    until = f" .. {span.until.rpartition('.')[2]}" if span.until else ""
    return span.path + until


def _make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog=PROGRAM,
        usage="python -m megatron_patches [--offload-activation] [--offload-modules NAME ...] [...] script.py ARGS",
        description="Applies the patches to megatron-core and runs a Megatron-LM script unchanged. The flags here are "
        "defaults; the script accepts them too.",
        allow_abbrev=False,
    )
    parser.add_argument("--list-modules", action="store_true", help="Print the names for --offload-modules and exit.")
    parser.add_argument(
        "--check",
        nargs="?",
        const="show",
        choices=("show", "accept"),
        help="Print which patches the installed megatron-core, or the checkout in this directory, would break, and "
        "exit with 1 if there is one. 'accept' notes its code as one against which the patches were reviewed.",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="Do not run the script: print what its training would take on --hardware. No GPU is needed.",
    )
    add_hardware_options(parser)
    return add_offload_arguments(parser)


def _check(how: str) -> int:
    """Check all rows against the installed megatron-core; return the exit status."""
    try:
        version = installed_version()
    except RuntimeError as error:
        end_run(PROGRAM, str(error))
    import megatron.core

    from megatron_patches._check import accept, check_rows, read_known, table_of
    from megatron_patches._handle import patch_rows

    rows = patch_rows(ModelRuntime(Settings(OffloadConfig(), ()), None))
    if how == "accept":
        try:
            accept(rows, version)
        except (PatchError, OSError) as error:
            end_run(PROGRAM, str(error))
    findings = check_rows(rows, version, read_known())
    write_out(f"{table_of(findings, version, os.path.dirname(megatron.core.__file__))}\n")
    return int(any(finding.state.breaks for finding in findings))


def _plan(parser: argparse.ArgumentParser, args: argparse.Namespace, script: Sequence[str]) -> None:
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    _log_to_stderr(logging.getLogger(TakeOver.__module__))  # the tables say what its other messages would
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core's, of kernels that a GPU would have
        from megatron_patches._rehearsal.command import show_plan  # imports megatron-core, which takes seconds

        if mistake := show_plan(args, _settings_or_end(parser, args), script):
            parser.error(mistake)


def _apply(parser: argparse.ArgumentParser, args: argparse.Namespace) -> tuple[Handle, Applied]:
    settings = _settings_or_end(parser, args)
    try:
        handle, cpu_support = apply_settings(settings), Applied()
        if not torch.cuda.is_available():
            logger.info("no GPU found: megatron-core is patched to run on the CPU")
            cpu_support = apply_cpu_support()
    except RuntimeError as error:
        end_run(PROGRAM, str(error))
    return handle, cpu_support


def _remove(handle: Handle, cpu_support: Applied, failure: BaseException | None) -> None:
    """End offload after the script, which writes the last plans and tables. No error here replaces the script's.

    If the script has failed on this rank alone, others wait for it: see `Handle.abandon`.
    """
    if isinstance(failure, Exception) and is_one_of_several():
        return handle.abandon()
    try:
        cpu_support.remove()  # first: its rows lie on those of the handle
        handle.remove()
    except Exception as error:
        is_captured = isinstance(error, OffloadError)  # megatron-core keeps its graphs until the process ends
        if not (failure is not None or is_captured):
            raise
        logger.log(logging.DEBUG if is_captured else logging.WARNING, "offload was not removed: %s", error)


def _settings_or_end(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Settings:
    try:
        return _settings(args)
    except (TypeError, ValueError) as error:
        parser.error(str(error))


def _settings(args: argparse.Namespace) -> Settings:
    has_choice = args.offload_gpu_budget is not None or args.offload_num_layers is not None
    defaults = DEFAULT_MODULES if args.offload_activation and not has_choice else ()
    config = offload_config_from_args(args)
    budget = None if args.offload_gpu_budget is None else parse_size(args.offload_gpu_budget)
    return Settings(
        config,
        canonical_names(args.offload_modules or defaults),
        args.offload_trace,
        args.offload_report,
        budget,
        args.offload_plan,
        args.offload_plan_plot,
        may_recompute=args.offload_recompute != "off",
        **part_settings(args, Settings(OffloadConfig(), ())),
    )


def _log_to_stderr(logger: logging.Logger = logger) -> None:
    # Only the messages of this package: the script sets up its own logging.
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def _run(script: Sequence[str]) -> None:
    sys.argv = list(script)
    runpy.run_path(script[0], run_name="__main__")


if __name__ == "__main__":
    main()
