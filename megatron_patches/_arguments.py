# SPDX-License-Identifier: Apache-2.0
"""Adds the settings as fields of TransformerConfig and as command-line flags, and resolves them for one model.

megatron.training makes a flag of every field of TransformerConfig and copies every flag into the configuration that it
builds. So the new fields are enough to give a stock script the new flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megatron_patches._flags import BOUNDS, RECOMPUTE, SETTINGS, SIZES, SWITCHES, Setting
from megatron_patches._model.modules import canonical_names, is_in_experts, known_names
from megatron_patches._model.thresholds import Thresholds, thresholds_of
from megatron_patches._rows.registry import Patch
from megatron_patches._take_over import TakeOver
from offload_engine import OffloadConfig
from offload_engine.config import HOST_POLICIES
from offload_engine.policies import PolicySettings, policy_for
from offload_engine.sizes import Size, parse_bytes, parse_size, size_setting

_CONFIGS = "megatron.core.transformer.transformer_config"
_WHY = "settings of activation offload in the model's configuration"
_PREFIX = "offload_"
DEFAULT_MODULES = ("core_attn",)


class Settings(NamedTuple):
    """Settings of one model, or the defaults of models whose configuration sets none."""

    engine: OffloadConfig
    modules: tuple[str, ...]
    trace: str | None = None
    """File for the recording of the second step."""

    has_report: bool = True
    """Whether rank 0 logs the tables of the second step."""

    gpu_budget: Size | None = None
    """What the process may hold on its GPU. If `modules` is empty, all that the model has is offloaded."""

    plan: str | None = None
    """File of the plan to begin with, and to write, if there is a budget for the GPU."""

    plan_plot: str | None = None
    """File for the picture of that plan."""

    may_recompute: bool = True
    """Whether layers may recompute what a budget would have them move."""
    num_layers: int | None = None
    """How many layers of each model chunk offload, the first ones; None: all."""

    thresholds: Thresholds = Thresholds()
    """Least sizes of what each name moves."""

    rank_delta_bytes: int = 0
    """Pipeline rank r keeps r times this many saved bytes on the device."""

    is_taken_over: bool = False
    """The names come from megatron-core's own setting, which allows names with nothing to move. As a default, every
    model is expected to have such a setting."""

    @property
    def is_on(self) -> bool:
        """Return whether models offload if their configuration sets nothing."""
        return bool(self.modules) or self.gpu_budget is not None or self.num_layers is not None


def add_offload_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the offload flags that `parser` does not have yet; return the parser."""
    group = parser.add_argument_group("activation offload")
    for setting in SETTINGS:
        _add_unless_there(group, setting.flag, **setting.argparse_kwargs())
    names = ", ".join(known_names())
    _add_unless_there(
        group,
        "--offload-modules",
        nargs="+",
        default=[],
        metavar="NAME",
        help=f"What to offload, with --offload-activation. Default: {DEFAULT_MODULES[0]}. Names: {names}.",
    )
    return parser


def offload_config_from_args(args: argparse.Namespace) -> OffloadConfig:
    """Return the engine's configuration for parsed flags; a flag that was not given leaves the engine's default.

    Raises:
        ValueError, TypeError: if `OffloadConfig` rejects a value, or flags are given without `--offload-activation`.
    """
    given = ["--offload-modules"] if getattr(args, "offload_modules", None) else []
    given += [s.flag for s in SETTINGS if getattr(args, s.name, s.default) != s.default]
    _check_bounds(args)
    if given and not (is_on(args) or getattr(args, "offload_engine", False)):
        raise ValueError(f"{', '.join(given)} without --offload-activation moves nothing: give both, or neither")
    return _engine_config(args, OffloadConfig())


def resolve(config: Any, defaults: Settings) -> Settings | None:
    """Return the settings that the configuration of a model selects; None if it offloads nothing.

    Raises:
        ValueError: if two settings exclude each other.
    """
    budget = _budget_of(config) or defaults.gpu_budget
    if not (is_on(config) or defaults.is_on):
        return None
    _check_others_are_off(config)
    own = getattr(config, "offload_modules", None) if is_on(config) else None
    parts = part_settings(config, defaults)
    _check_layers_save(config, parts["num_layers"])
    has_choice = budget is not None or parts["num_layers"] is not None
    modules = canonical_names(own or defaults.modules or (() if has_choice else DEFAULT_MODULES))
    _check_no_paged_stash(config, modules)
    parts["thresholds"].check(modules)
    trace = getattr(config, "offload_trace", None) or defaults.trace
    plan = getattr(config, "offload_plan", None) or defaults.plan
    plot = getattr(config, "offload_plan_plot", None) or defaults.plan_plot
    engine = _engine_config(config, defaults.engine)
    recompute = getattr(config, "offload_recompute", None)
    parts["may_recompute"] = defaults.may_recompute if recompute is None else recompute == "auto"
    return Settings(engine, modules, trace, has_report(config, defaults), budget, plan, plot, **parts)


def part_settings(source: Any, defaults: Settings) -> dict[str, Any]:
    """Return the fields of `Settings` that say which part of the named modules' tensors moves.

    Raises:
        ValueError: if a value is not a size, or the thresholds have an unknown name.
    """
    num_layers = getattr(source, "offload_num_layers", None)
    own = thresholds_of(source)
    return {
        "num_layers": defaults.num_layers if num_layers is None else num_layers,
        "thresholds": defaults.thresholds
        if own == Thresholds()
        else own.with_default(defaults.engine.min_tensor_bytes),
        "rank_delta_bytes": _size_of(source, "offload_rank_delta_bytes") or defaults.rank_delta_bytes,
        "is_taken_over": bool(getattr(source, "offload_engine", False)),
    }


def is_on(source: Any) -> bool:
    """Return whether a configuration, or parsed flags, ask for offload: by the switch or by a budget."""
    return bool(getattr(source, "offload_activation", False)) or getattr(source, "offload_gpu_budget", None) is not None


def has_report(config: Any, defaults: Settings) -> bool:
    """Return whether rank 0 logs tables for a model of this configuration."""
    return defaults.has_report and getattr(config, "offload_report", True)


def config_rows(take_over: TakeOver | None = None, *, is_on_by_default: bool = False) -> list[Patch]:
    """Return the rows that give TransformerConfig and MLATransformerConfig the new fields, and translate others.

    Args:
        take_over: translates megatron-core's own settings.
        is_on_by_default: models offload even if their configuration does not ask for it, so other fields take effect.
    """
    base = f"{_CONFIGS}:TransformerConfig"
    rows = [_class_default(base, setting) for setting in SETTINGS]
    for owner in (base, f"{_CONFIGS}:MLATransformerConfig"):
        rows.append(Patch(target=f"{owner}.__dataclass_fields__", wrapper=_add_fields, why=_WHY))
        rows.append(Patch(target=f"{owner}.__init__", wrapper=_wrap_init, why=_WHY))
    take_over = take_over or TakeOver(is_for_all=False)
    post_init = functools.partial(_wrap_post_init, take_over=take_over, is_on_by_default=is_on_by_default)
    rows.append(Patch(target=f"{base}.__post_init__", wrapper=post_init, why=_WHY))
    return rows


def _add_unless_there(group: argparse._ArgumentGroup, flag: str, **kwargs: Any) -> None:
    try:
        group.add_argument(flag, **kwargs)
    except argparse.ArgumentError:
        # megatron.training has made the flag from the configuration's field
        return


def _class_default(owner: str, setting: Setting) -> Patch:
    # A configuration made before `apply()` has no such instance attribute and reads the default on the class.
    return Patch(target=f"{owner}.{setting.name}", wrapper=lambda _: setting.default, why=_WHY, is_new=True)


def _add_fields(fields: dict[str, Any]) -> dict[str, Any]:
    definitions = [setting.definition() for setting in SETTINGS]
    new = dataclasses.fields(dataclasses.make_dataclass("_OffloadFields", definitions, kw_only=True))
    return {**fields, **{field.name: field for field in new}}


def _wrap_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for setting in SETTINGS:
            setattr(self, setting.name, kwargs.pop(setting.name, setting.default))
        original(self, *args, **kwargs)

    return init


def _wrap_post_init(
    original: Callable[..., None], *, take_over: TakeOver, is_on_by_default: bool
) -> Callable[..., None]:
    @functools.wraps(original)
    def post_init(self: Any) -> None:
        original(self)
        take_over.translate(self)
        check_fields(self, is_on_by_default)

    return post_init


def check_fields(config: Any, is_on_by_default: bool = False) -> None:
    """Check the offload fields of a configuration against each other and against megatron-core's own.

    Args:
        config: configuration of a model.
        is_on_by_default: the model offloads even if it has neither `offload_activation` nor a budget.

    Raises:
        ValueError: if a switch is not a bool, a module name or host policy is unknown, a value is not a size, a field
            is set where nothing offloads, a budget is combined with a bound that it replaces, megatron-core's own
            offloading is on too, or its paged stash is on and a name is in the experts.
    """
    for name in SWITCHES:
        if not isinstance(getattr(config, name, False), bool):
            raise ValueError(f"{name} must be True or False, got {getattr(config, name)!r}")
    for name in SIZES:
        _size_of(config, name)
    thresholds_of(config)
    _check_num_layers(config)
    if config.offload_host_policy not in (None, *HOST_POLICIES):
        raise ValueError(
            f"offload_host_policy must be one of {', '.join(HOST_POLICIES)}, got {config.offload_host_policy!r}"
        )
    if config.offload_recompute not in (None, *RECOMPUTE):
        raise ValueError(f"offload_recompute must be one of {', '.join(RECOMPUTE)}, got {config.offload_recompute!r}")
    _budget_of(config)
    _check_bounds(config)
    if is_on(config):
        _check_others_are_off(config)
        _check_no_paged_stash(config, canonical_names(config.offload_modules or (), config))
        _check_limit(config)
    elif not (is_on_by_default or config.offload_engine or config.fine_grained_activation_offloading):
        _check_nothing_is_set(config)


def _check_nothing_is_set(config: Any) -> None:
    values = {"offload_modules": config.offload_modules} | {s.name: getattr(config, s.name) for s in SETTINGS}
    defaults = {setting.name: setting.default for setting in SETTINGS}
    for name, value in values.items():
        if value and value != defaults.get(name):
            raise ValueError(
                f"{name}={value} without offload_activation=True moves nothing: set offload_activation "
                f"(--offload-activation), or omit {name}"
            )


def _size_of(source: Any, name: str) -> int | None:
    """Return a size of a configuration or of parsed flags in bytes; None if it is not set.

    Raises:
        ValueError: if the value is not a size; names the setting.
    """
    return size_setting(name, getattr(source, name, None), parse_bytes)


def _budget_of(source: Any) -> Size | None:
    """Return the budget of a configuration or of parsed flags; None if it is not set.

    Raises:
        ValueError: if the value is not a size; names the setting.
    """
    value = getattr(source, "offload_gpu_budget", None)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, str))):
        raise ValueError(f"offload_gpu_budget must be a size, such as '60GiB', '90%' or 'auto', got {value!r}")
    try:
        return None if value is None else parse_size(str(value))
    except ValueError as error:
        raise ValueError(f"offload_gpu_budget (--offload-gpu-budget): {error}") from None


def _check_num_layers(config: Any) -> None:
    num = config.offload_num_layers
    if num is None:
        return
    if isinstance(num, bool) or not isinstance(num, int) or num < 1:
        raise ValueError(f"offload_num_layers must be a positive number of layers, got {num!r}")
    _check_layers_save(config, num)


def _check_layers_save(config: Any, num_layers: int | None) -> None:
    if num_layers is not None and getattr(config, "recompute_granularity", None) == "full":
        raise ValueError(
            f"offload_num_layers={num_layers} selects layers, and with recompute_granularity='full' saved tensors "
            "belong to no layer: omit one of the two"
        )


def _check_limit(config: Any) -> None:
    # Without a threshold here, `apply()` may have lowered it: the first step checks the two together.
    if None not in (config.offload_host_limit_bytes, config.offload_min_tensor_bytes):
        _engine_config(config, OffloadConfig())


def _check_bounds(config: Any) -> None:
    if config.offload_gpu_budget is not None:
        _check_is_alone(config)
    for name in ("offload_plan", "offload_plan_plot", "offload_recompute"):
        if config.offload_gpu_budget is None and getattr(config, name, None) is not None:
            raise ValueError(
                f"{name}={getattr(config, name)} needs a budget: give --offload-gpu-budget as well, or "
                f"omit --{name.replace('_', '-')}"
            )
    if config.offload_resident_bytes is None:
        return
    for other in ("offload_horizon_bytes", "offload_max_inflight_bytes"):
        if getattr(config, other) is not None:
            raise ValueError(f"offload_resident_bytes replaces {other}: set only one of the two")


def _check_is_alone(config: Any) -> None:
    shares = ("offload_fraction", "offload_rank_delta_bytes")
    for other in (*(_PREFIX + name for name in BOUNDS), *shares, "offload_dry_run"):
        if getattr(config, other, None) not in (None, False):
            raise ValueError(
                f"offload_gpu_budget={config.offload_gpu_budget} decides what stays on the device, and so does "
                f"{other}={getattr(config, other)}: omit one of --offload-gpu-budget and "
                f"--{other.replace('_', '-')}"
            )


def _check_others_are_off(config: Any) -> None:
    for other in ("fine_grained_activation_offloading", "cpu_offloading"):
        if getattr(config, other, False):
            raise ValueError(
                f"offload_activation and megatron-core's own {other} would both move the same tensors: switch one of "
                "them off, or set offload_engine=True (--offload-engine) instead of offload_activation, before the "
                "configuration is made, and its settings are taken over"
            )


def _check_no_paged_stash(config: Any, names: Sequence[str]) -> None:
    inside = [name for name in names if is_in_experts(name)]
    # The stash enters its hooks inside the experts, so no tensor saved there would reach the groups.
    if inside and getattr(config, "moe_paged_stash", False):
        raise ValueError(
            f"offload_modules has {', '.join(map(repr, inside))}, but megatron-core's own moe_paged_stash=True keeps "
            "what the experts save: switch that off, or omit the names"
        )


def _engine_config(source: Any, base: OffloadConfig) -> OffloadConfig:
    # A budget needs the GPU's size, and what a rank keeps its number.
    names = (field.name for field in dataclasses.fields(base) if field.name not in ("gpu_budget", "kept_bytes"))
    given = {name: _value_of(source, _source_name(name)) for name in names}
    given["min_tensor_bytes"] = thresholds_of(source).least_bytes(base.min_tensor_bytes)
    changes = {name: value for name, value in given.items() if value is not None and value is not False}
    return base.replace(**changes, **_policy(source))


def _policy(source: Any) -> dict[str, PolicySettings]:
    """Return the `policy` field that the flags select; empty if none of them was given."""
    bounds: dict[str, Any] = {name: _size_of(source, _PREFIX + name) for name in BOUNDS}
    policy = policy_for(**bounds, planned=getattr(source, "offload_planned", False))
    return {} if policy is None else {"policy": policy}


def _value_of(source: Any, name: str) -> Any:
    return _size_of(source, name) if name in SIZES else getattr(source, name, None)


def _source_name(field: str) -> str:
    return _PREFIX + {"directory": "dir"}.get(field, field)


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate the launcher's own flags from the script and its arguments.

    The script is the first argument that ends in ".py" and is not the value of a flag.
    """
    takes_value = {setting.flag for setting in SETTINGS if setting.parse is not None}
    for position, token in enumerate(argv):
        is_value = position > 0 and argv[position - 1] in takes_value
        if token.endswith(".py") and not is_value and not token.startswith("-"):
            return list(argv[:position]), list(argv[position:])
    return list(argv), []
