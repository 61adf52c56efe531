# SPDX-License-Identifier: Apache-2.0
"""Maps module names to submodules of a transformer layer, in one table.

To add a name, add a row. A span is what one group covers: one call of a submodule, or the range from the output of one
submodule to the input of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple


class Span(NamedTuple):
    """One call of `path`, or the range from its output to the input of `until`; "*" stands for any one name."""

    path: str
    until: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModuleRow:
    """One name that a user can give."""

    name: str
    saves: str
    """The tensors that its backward needs, which move."""

    spans: tuple[Span, ...]
    """Paths relative to a layer: transformer, Mamba, or multi-token prediction."""

    aliases: tuple[str, ...] = ()
    recomputed_by: tuple[str, ...] = ()
    """Values of `recompute_modules` under which the module itself is recomputed and saves nothing."""

    discarded_by: tuple[str, ...] = ()
    """Values of `recompute_modules` under which what it saves is discarded and recomputed."""

    input_of: tuple[str, ...] = ()
    """Values of `recompute_modules` under which it moves the input of the recomputation."""

    parts: tuple[str, ...] = ()
    """Names inside this one. Given together, this one's groups hold their tensors too."""

    only_in: str = ""
    """Class of the module that contains the spans, if others have submodules of the same names; "": any."""

    shares_with: tuple[str, ...] | None = None
    """The other names whose spans save, or may save, some of the same tensors; None: not known."""

    where: str = ""
    """The models that have it, for the error if a model does not."""

    instead: str = ""
    """The name to use if this one is an identity, because its work is fused into another module."""


def _calls(*paths: str) -> tuple[Span, ...]:
    return tuple(Span(path) for path in paths)


def _ranges(owner_paths: Iterable[str]) -> tuple[Span, ...]:
    return tuple(Span(f"{owner}.linear_fc1", f"{owner}.linear_fc2") for owner in owner_paths)


_MLA_DOWN = ("linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj", "linear_qkv_down_proj")
_MLA_UP = ("linear_q_up_proj", "linear_kv_up_proj")
EXPERTS = "mlp.experts"
"""Path of a layer's experts."""

DISPATCH = "dispatched_tokens"
"""The row whose range begins at the dispatcher."""

_EXPERTS = (EXPERTS, f"{EXPERTS}.local_experts.*")
_MOE = "layers with experts (MoELayer)"
_EXPERT_LINEARS = (
    "experts with linear_fc1 and linear_fc2 (TEGroupedMLP or SequentialMLP; the legacy GroupedMLP has none)"
)
_DENSE = "layers with a dense MLP"
_NORM = "layers with a norm module of their own"
_MLA = "layers with multi-latent attention"
_MTP = "a model with multi-token prediction (mtp_num_layers)"
_MAMBA = "Mamba layers (HybridModel)"
_GDP = "layers with a mixer of GatedDeltaProduct (HybridModel, from 0.20 on)"

# In the order in which a layer runs them, which decides which groups of a chunk come last.
MODULES: tuple[ModuleRow, ...] = (
    ModuleRow(
        name="layer_input",
        saves="the input of the layer (with full recomputation: all that is saved)",
        spans=_calls("input_layernorm"),
        recomputed_by=("layernorm",),
        discarded_by=("mhc",),
        input_of=("layernorm",),
        parts=("attn_norm",),
        shares_with=("attn_norm", "self_attn", "qkv_linear", "mla_down_proj"),
        where=_NORM,
        instead="qkv_linear",
    ),
    ModuleRow(
        name="attn_norm",
        saves="input of the norm before attention",
        spans=_calls("input_layernorm"),
        recomputed_by=("layernorm",),
        discarded_by=("mhc",),
        input_of=("layernorm",),
        shares_with=("layer_input", "self_attn", "qkv_linear", "mla_down_proj"),
        where=_NORM,
        instead="qkv_linear",
    ),
    ModuleRow(
        name="self_attn",
        saves="all that attention saves: the next six, and what lies between",
        spans=_calls("self_attention"),
        parts=("qkv_linear", "mla_down_proj", "qk_norm", "mla_up_proj", "core_attn", "attn_proj"),
        where="layers with self attention",
    ),
    ModuleRow(
        name="qkv_linear",
        saves="input of the query, key and value projections (multi-latent attention: of all of them)",
        spans=_calls(
            *(f"self_attention.{name}" for name in ("linear_qkv", "in_proj", *_MLA_DOWN, *_MLA_UP)),
        ),
        recomputed_by=("mla_up_proj",),
        discarded_by=("layernorm",),
        input_of=("mla_up_proj",),
        parts=("mla_down_proj", "mla_up_proj"),
        shares_with=("layer_input", "attn_norm", "self_attn", "mla_down_proj", "qk_norm", "mla_up_proj"),
        where="layers with self attention",
    ),
    ModuleRow(
        name="mla_down_proj",
        saves="input of the projections to the latents, and of the query's where it has no latent",
        spans=_calls(*(f"self_attention.{name}" for name in _MLA_DOWN)),
        discarded_by=("layernorm",),
        where=_MLA,
    ),
    ModuleRow(
        name="qk_norm",
        saves="inputs of the norms of query and key (multi-latent attention: of their latents)",
        spans=_calls(*(f"self_attention.{name}_layernorm" for name in ("q", "kv", "k"))),
        where=_NORM + " for query and key",
        instead="mla_up_proj",
    ),
    ModuleRow(
        name="mla_up_proj",
        saves="the latents of query, key and value",
        spans=_calls(*(f"self_attention.{name}" for name in _MLA_UP)),
        recomputed_by=("mla_up_proj",),
        input_of=("mla_up_proj",),
        where=_MLA,
    ),
    ModuleRow(
        name="core_attn",
        aliases=("core_attention",),
        saves="query, key, value and what the attention kernel keeps (unfused: the probabilities; flash: its output, "
        "which attn_proj saves as well: it leaves only with both)",
        spans=_calls("self_attention.core_attention", "cross_attention.core_attention"),
        recomputed_by=("core_attn",),
        input_of=("core_attn",),
        shares_with=("self_attn", "qk_norm", "attn_proj"),
        where="layers with self attention",
    ),
    ModuleRow(
        name="attn_proj",
        aliases=("attn_linear",),
        saves="input of the output projection",
        spans=_calls("self_attention.linear_proj", "self_attention.out_proj", "cross_attention.linear_proj"),
        # Only for GatedDeltaNet (out_proj). Plain attention in other layers still moves its own, and then the name is
        # accepted. Discarded tensors are never copied.
        discarded_by=("gdn_norm_out",),
        shares_with=("self_attn", "core_attn"),
        where="layers with self attention",
    ),
    ModuleRow(
        name="mlp_norm",
        saves="input of the norm before the MLP or the experts",
        spans=_calls("pre_mlp_layernorm"),
        recomputed_by=("layernorm",),
        discarded_by=("mhc",),
        input_of=("layernorm",),
        shares_with=("mlp_fc1", "shared_experts", "shared_fc1", "router", DISPATCH),
        where=_NORM,
        instead="mlp_fc1",
    ),
    ModuleRow(
        name="mlp_fc1",
        saves="input of the dense MLP",
        spans=_calls("mlp.linear_fc1"),
        recomputed_by=("mlp",),
        discarded_by=("layernorm",),
        input_of=("mlp",),
        where=_DENSE,
    ),
    ModuleRow(
        name="mlp_act",
        saves="input of the dense MLP's activation function",
        spans=_ranges(["mlp"]),
        recomputed_by=("mlp",),
        where=_DENSE,
    ),
    ModuleRow(
        name="mlp_fc2",
        saves="output of the dense MLP's activation function",
        spans=_calls("mlp.linear_fc2"),
        recomputed_by=("mlp",),
        where=_DENSE,
    ),
    ModuleRow(
        name="shared_experts",
        saves="all that the shared experts save (their input leaves only with router)",
        spans=_calls("mlp.shared_experts"),
        recomputed_by=("moe", "shared_experts"),
        input_of=("shared_experts",),
        parts=("shared_fc1", "shared_fc2"),
        where="layers with shared experts that do not overlap with communication",
    ),
    ModuleRow(
        name="shared_fc1",
        saves="input of the shared experts (the router saves it as well: it leaves only with both)",
        spans=_calls("mlp.shared_experts.linear_fc1"),
        recomputed_by=("moe", "shared_experts"),
        discarded_by=("layernorm",),
        input_of=("shared_experts",),
        where="layers with shared experts",
    ),
    ModuleRow(
        name="shared_fc2",
        saves="output of the shared experts' activation function",
        spans=_calls("mlp.shared_experts.linear_fc2"),
        recomputed_by=("moe", "shared_experts"),
        where="layers with shared experts",
    ),
    ModuleRow(
        name="router",
        saves="input of the router, and its scores",
        spans=_calls("mlp.router"),
        recomputed_by=("moe",),
        discarded_by=("layernorm",),
        input_of=("moe",),
        shares_with=("mlp_norm", "shared_experts", "shared_fc1", DISPATCH),
        where=_MOE,
    ),
    ModuleRow(
        name=DISPATCH,
        saves="what the dispatcher keeps of its permutation, and the permuted tokens as the experts get them (their "
        "probabilities leave with moe_act)",
        spans=(
            Span("mlp.router", EXPERTS),
            *_calls(*(f"{owner}.linear_fc1" for owner in _EXPERTS)),
        ),
        recomputed_by=("moe",),
        parts=("router_fc1",),
        where=_MOE,
    ),
    ModuleRow(
        name="experts",
        aliases=("fused_group_mlp",),
        saves="all that the experts save: the next three, and what lies between",
        spans=_calls(EXPERTS),
        recomputed_by=("moe",),
        parts=("router_fc1", "moe_act", "router_fc2"),
        where=_MOE,
    ),
    ModuleRow(
        name="router_fc1",
        aliases=("expert_fc1",),
        saves="tokens routed to the experts here",
        spans=_calls(*(f"{owner}.linear_fc1" for owner in _EXPERTS)),
        recomputed_by=("moe",),
        shares_with=(DISPATCH, "experts"),
        where=_EXPERT_LINEARS,
    ),
    ModuleRow(
        name="moe_act",
        saves="input of the experts' activation function",
        spans=_ranges(_EXPERTS),
        recomputed_by=("moe", "moe_act"),
        input_of=("moe_act",),
        where=_EXPERT_LINEARS,
    ),
    ModuleRow(
        name="router_fc2",
        aliases=("expert_fc2",),
        saves="output of the experts' activation function",
        spans=_calls(*(f"{owner}.linear_fc2" for owner in _EXPERTS)),
        recomputed_by=("moe",),
        discarded_by=("moe_act",),
        shares_with=("experts",),
        where=_EXPERT_LINEARS,
    ),
    ModuleRow(
        name="mamba_mixer",
        saves="all that the mixer saves: the next three, and what lies between",
        spans=_calls("mixer"),
        parts=("mamba_in_proj", "gdp_qkv", "mamba_out_proj"),
        where=_MAMBA,
    ),
    ModuleRow(
        name="mamba_in_proj",
        saves="input of the mixer's first projection",
        spans=_calls("mixer.in_proj"),
        recomputed_by=("gdp_in_proj",),
        input_of=("gdp_in_proj",),
        where=_MAMBA,
    ),
    ModuleRow(
        name="gdp_qkv",
        saves="what the convolution, the preparation of query, key and value, and the kernel of GatedDeltaProduct save",
        spans=(Span("mixer.in_proj", "mixer.norm"),),
        only_in="GatedDeltaProductMixer",
        discarded_by=("gdp_in_proj",),
        where=_GDP,
    ),
    ModuleRow(
        name="mamba_out_proj",
        saves="input of the mixer's output projection",
        spans=_calls("mixer.out_proj"),
        where=_MAMBA,
    ),
    ModuleRow(
        name="mtp_norm",
        saves="inputs of the norms before and after a multi-token-prediction layer",
        spans=_calls("enorm", "hnorm", "final_layernorm"),
        where=_MTP,
    ),
    ModuleRow(
        name="mtp_proj",
        saves="input of the projection before a multi-token-prediction layer",
        spans=_calls("eh_proj"),
        where=_MTP,
    ),
)


def row_of(name: str, config: Any = None) -> ModuleRow:
    """Return the row of a name or an alias.

    Raises:
        ValueError: if the name is unknown; suggests the nearest name and lists all names of the table, or those that a
            model with this configuration can have.
    """
    for row in MODULES:
        if name == row.name or name in row.aliases:
            return row
    known = known_names(config)
    hint = f" ({_hint(str(name), known)})" if _hint(str(name), known) else ""
    whose = "known are" if config is None else "known for this configuration"
    raise ValueError(f"unknown module name {name!r} in offload_modules{hint}; {whose}: {', '.join(known)}")


def _hint(name: str, known: Sequence[str]) -> str:
    if name == "all":
        return "to offload all that the model has, omit --offload-modules and give --offload-gpu-budget, such as auto"
    if begun := [other for other in known if other.startswith(f"{name}_")]:
        return f"did you mean {' '.join(begun)}?"
    nearest = get_close_matches(name, known, n=1)
    return f"did you mean {nearest[0]!r}?" if nearest else ""


def inputs_of(name: str) -> tuple[str, ...]:
    """Return the `input_of` of the row with this name; empty if there is none."""
    return next((row.input_of for row in MODULES if row.name == name), ())


def known_names(config: Any = None) -> list[str]:
    """Return every name and alias, or those that a model with this TransformerConfig can have, in table order."""
    rows = [row for row in MODULES if config is None or _can_have(config, row)]
    return [name for row in rows for name in (row.name, *row.aliases)]


def canonical_names(names: Iterable[str], config: Any = None) -> tuple[str, ...]:
    """Resolve aliases; return the names without repetitions, in table order. "a,b" stands for two names.

    Raises:
        ValueError: if a name is unknown, or `names` is a string.
    """
    if isinstance(names, str):
        raise ValueError(f"offload_modules must be a list of names, got the string {names!r}")
    wanted = {row_of(part, config).name for name in names for part in str(name).split(",") if part}
    return tuple(row.name for row in MODULES if row.name in wanted)


def drop_parts(names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split `names` into those to attach and those that are parts of others."""
    inside = {part for name in names for part in row_of(name).parts}
    return tuple(n for n in names if n not in inside), tuple(n for n in names if n in inside)


def whole_of(path: str) -> str | None:
    """Return the name whose groups are the calls of the submodule at `path` of a model, or None."""
    calls = {span.path: row.name for row in MODULES for span in row.spans if span.until is None}
    return next((name for call, name in calls.items() if f".{path}".endswith(f".{call}")), None)


def is_in_experts(name: str) -> bool:
    """Return whether a span of this name is the experts, or lies inside them."""
    return any(f"{span.path}.".startswith(f"{EXPERTS}.") for span in row_of(name).spans)


def unshared_rows(names: Iterable[str]) -> tuple[ModuleRow, ...]:
    """Return the rows known to save no tensor that a span of `names` saves."""
    asked = frozenset(names)
    return tuple(r for r in MODULES if r.shares_with is not None and asked.isdisjoint((r.name, *r.shares_with)))


def _can_have(config: Any, row: ModuleRow) -> bool:
    path = row.spans[0].path
    if row.where == _MLA:
        return bool(config.multi_latent_attention)
    if row.where == _MTP:
        return bool(config.mtp_num_layers)
    if path.startswith("mlp.shared_experts"):
        return bool(config.moe_shared_expert_intermediate_size)
    if path.startswith(("mlp.experts", "mlp.router")):
        return bool(config.num_moe_experts)
    if path.startswith("mlp."):
        frequency = config.moe_layer_freq
        has_experts_only = frequency == 1 if isinstance(frequency, int) else all(frequency)
        return not (config.num_moe_experts and has_experts_only)
    return True
