"""The one table from module names to submodules of a transformer layer.

To add a name, add a row. A bracket is what one group spans: one call of a submodule, or the stretch from the output of
one submodule to the input of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple


class Bracket(NamedTuple):
    """One call of `path`, or from the output of `path` to the input of `until`; "*" stands for any one name."""

    path: str
    until: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModuleRow:
    """One name a user can ask for."""

    name: str
    saves: str
    """What its backward needs, that is, what is moved."""

    brackets: tuple[Bracket, ...]
    """Paths relative to a layer: transformer, Mamba, or multi-token prediction."""

    aliases: tuple[str, ...] = ()
    recomputed_by: tuple[str, ...] = ()
    """Values of `recompute_modules` under which the module itself is recomputed: it saves nothing then."""

    discarded_by: tuple[str, ...] = ()
    """Values of `recompute_modules` under which what it saves is discarded and computed again."""

    parts: tuple[str, ...] = ()
    """Names inside this one: asked for together, this one's groups hold their tensors too."""

    shares_with: tuple[str, ...] | None = None
    """The other names whose brackets save, or may save, some of the same tensors; None: not known."""

    where: str = ""
    """Where a model has it, for the error when it does not."""

    instead: str = ""
    """What to ask for where it is an identity, because its work is fused into another module."""


def _calls(*paths: str) -> tuple[Bracket, ...]:
    return tuple(Bracket(path) for path in paths)


def _ranges(owner_paths: Iterable[str]) -> tuple[Bracket, ...]:
    return tuple(Bracket(f"{owner}.linear_fc1", f"{owner}.linear_fc2") for owner in owner_paths)


_MLA_DOWN = ("linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj", "linear_qkv_down_proj")
_MLA_UP = ("linear_q_up_proj", "linear_kv_up_proj")
EXPERTS = "mlp.experts"
"""Path of a layer's experts."""

DISPATCH = "dispatched_tokens"
"""The row whose stretch begins where the dispatcher does."""

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

# In the order in which a layer runs them: which groups of a chunk come last follows from it.
MODULES: tuple[ModuleRow, ...] = (
    ModuleRow(
        name="layer_input",
        saves="the input of the layer (with full recomputation: all that is saved)",
        brackets=_calls("input_layernorm"),
        recomputed_by=("layernorm",),
        parts=("attn_norm",),
        shares_with=("attn_norm", "self_attn", "qkv_linear", "mla_down_proj"),
        where=_NORM,
        instead="qkv_linear",
    ),
    ModuleRow(
        name="attn_norm",
        saves="input of the norm before attention",
        brackets=_calls("input_layernorm"),
        recomputed_by=("layernorm",),
        shares_with=("layer_input", "self_attn", "qkv_linear", "mla_down_proj"),
        where=_NORM,
        instead="qkv_linear",
    ),
    ModuleRow(
        name="self_attn",
        saves="all that attention saves: the next six, and what lies between",
        brackets=_calls("self_attention"),
        parts=("qkv_linear", "mla_down_proj", "qk_norm", "mla_up_proj", "core_attn", "attn_proj"),
        where="layers with self attention",
    ),
    ModuleRow(
        name="qkv_linear",
        saves="input of the query, key and value projections (multi-latent attention: of all of them)",
        brackets=_calls(
            *(f"self_attention.{name}" for name in ("linear_qkv", "in_proj", *_MLA_DOWN, *_MLA_UP)),
        ),
        recomputed_by=("mla_up_proj",),
        discarded_by=("layernorm",),
        parts=("mla_down_proj", "mla_up_proj"),
        shares_with=("layer_input", "attn_norm", "self_attn", "mla_down_proj", "qk_norm", "mla_up_proj"),
        where="layers with self attention",
    ),
    ModuleRow(
        name="mla_down_proj",
        saves="input of the projections to the latents, and of the query's where it has no latent",
        brackets=_calls(*(f"self_attention.{name}" for name in _MLA_DOWN)),
        discarded_by=("layernorm",),
        where=_MLA,
    ),
    ModuleRow(
        name="qk_norm",
        saves="inputs of the norms of query and key (multi-latent attention: of their latents)",
        brackets=_calls(*(f"self_attention.{name}_layernorm" for name in ("q", "kv", "k"))),
        where=_NORM + " for query and key",
        instead="mla_up_proj",
    ),
    ModuleRow(
        name="mla_up_proj",
        saves="the latents of query, key and value",
        brackets=_calls(*(f"self_attention.{name}" for name in _MLA_UP)),
        recomputed_by=("mla_up_proj",),
        where=_MLA,
    ),
    ModuleRow(
        name="core_attn",
        aliases=("core_attention",),
        saves="query, key, value and what the attention kernel keeps (unfused: the probabilities; flash: its output, "
        "which attn_proj saves as well: it leaves only with both)",
        brackets=_calls("self_attention.core_attention", "cross_attention.core_attention"),
        recomputed_by=("core_attn",),
        shares_with=("self_attn", "qk_norm", "attn_proj"),
        where="layers with self attention",
    ),
    ModuleRow(
        name="attn_proj",
        aliases=("attn_linear",),
        saves="input of the output projection",
        brackets=_calls("self_attention.linear_proj", "self_attention.out_proj", "cross_attention.linear_proj"),
        # Of GatedDeltaNet (out_proj) alone: plain attention in other layers still moves its own, and then the name is
        # accepted. What is discarded is never copied.
        discarded_by=("gdn_norm_out",),
        shares_with=("self_attn", "core_attn"),
        where="layers with self attention",
    ),
    ModuleRow(
        name="mlp_norm",
        saves="input of the norm before the MLP or the experts",
        brackets=_calls("pre_mlp_layernorm"),
        recomputed_by=("layernorm",),
        shares_with=("mlp_fc1", "shared_experts", "shared_fc1", "router", DISPATCH),
        where=_NORM,
        instead="mlp_fc1",
    ),
    ModuleRow(
        name="mlp_fc1",
        saves="input of the dense MLP",
        brackets=_calls("mlp.linear_fc1"),
        recomputed_by=("mlp",),
        discarded_by=("layernorm",),
        where=_DENSE,
    ),
    ModuleRow(
        name="mlp_act",
        saves="input of the dense MLP's activation function",
        brackets=_ranges(["mlp"]),
        recomputed_by=("mlp",),
        where=_DENSE,
    ),
    ModuleRow(
        name="mlp_fc2",
        saves="output of the dense MLP's activation function",
        brackets=_calls("mlp.linear_fc2"),
        recomputed_by=("mlp",),
        where=_DENSE,
    ),
    ModuleRow(
        name="shared_experts",
        saves="all that the shared experts save (their input leaves only with router)",
        brackets=_calls("mlp.shared_experts"),
        recomputed_by=("moe", "shared_experts"),
        parts=("shared_fc1", "shared_fc2"),
        where="layers with shared experts that do not overlap with communication",
    ),
    ModuleRow(
        name="shared_fc1",
        saves="input of the shared experts (the router saves it as well: it leaves only with both)",
        brackets=_calls("mlp.shared_experts.linear_fc1"),
        recomputed_by=("moe", "shared_experts"),
        discarded_by=("layernorm",),
        where="layers with shared experts",
    ),
    ModuleRow(
        name="shared_fc2",
        saves="output of the shared experts' activation function",
        brackets=_calls("mlp.shared_experts.linear_fc2"),
        recomputed_by=("moe", "shared_experts"),
        where="layers with shared experts",
    ),
    ModuleRow(
        name="router",
        saves="input of the router, and its scores",
        brackets=_calls("mlp.router"),
        recomputed_by=("moe",),
        discarded_by=("layernorm",),
        shares_with=("mlp_norm", "shared_experts", "shared_fc1", DISPATCH),
        where=_MOE,
    ),
    ModuleRow(
        name=DISPATCH,
        saves="what the dispatcher keeps of its permutation, and the permuted tokens as the experts get them (their "
        "probabilities leave with moe_act)",
        brackets=(
            Bracket("mlp.router", EXPERTS),
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
        brackets=_calls(EXPERTS),
        recomputed_by=("moe",),
        parts=("router_fc1", "moe_act", "router_fc2"),
        where=_MOE,
    ),
    ModuleRow(
        name="router_fc1",
        aliases=("expert_fc1",),
        saves="tokens routed to the experts here",
        brackets=_calls(*(f"{owner}.linear_fc1" for owner in _EXPERTS)),
        recomputed_by=("moe",),
        shares_with=(DISPATCH, "experts"),
        where=_EXPERT_LINEARS,
    ),
    ModuleRow(
        name="moe_act",
        saves="input of the experts' activation function",
        brackets=_ranges(_EXPERTS),
        recomputed_by=("moe", "moe_act"),
        where=_EXPERT_LINEARS,
    ),
    ModuleRow(
        name="router_fc2",
        aliases=("expert_fc2",),
        saves="output of the experts' activation function",
        brackets=_calls(*(f"{owner}.linear_fc2" for owner in _EXPERTS)),
        recomputed_by=("moe",),
        discarded_by=("moe_act",),
        shares_with=("experts",),
        where=_EXPERT_LINEARS,
    ),
    ModuleRow(
        name="mamba_mixer",
        saves="all that the mixer saves: the next two, and what lies between",
        brackets=_calls("mixer"),
        parts=("mamba_in_proj", "mamba_out_proj"),
        where=_MAMBA,
    ),
    ModuleRow(
        name="mamba_in_proj",
        saves="input of the mixer's first projection",
        brackets=_calls("mixer.in_proj"),
        where=_MAMBA,
    ),
    ModuleRow(
        name="mamba_out_proj",
        saves="input of the mixer's output projection",
        brackets=_calls("mixer.out_proj"),
        where=_MAMBA,
    ),
    ModuleRow(
        name="mtp_norm",
        saves="inputs of the norms in front of and behind a layer that predicts one token more",
        brackets=_calls("enorm", "hnorm", "final_layernorm"),
        where=_MTP,
    ),
    ModuleRow(
        name="mtp_proj",
        saves="input of the projection in front of a layer that predicts one token more",
        brackets=_calls("eh_proj"),
        where=_MTP,
    ),
)


def row_of(name: str, config: Any = None) -> ModuleRow:
    """The row of a name or an alias.

    Raises:
        ValueError: for a name that is not in the table, with the nearest of those that are, or that a model with this
            configuration can have, and all of them.
    """
    for row in MODULES:
        if name == row.name or name in row.aliases:
            return row
    known = known_names(config)
    nearest = get_close_matches(str(name), known, n=1)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    whose = "known are" if config is None else "known for this configuration"
    raise ValueError(f"unknown module name {name!r} in offload_modules{hint}; {whose}: {', '.join(known)}")


def known_names(config: Any = None) -> list[str]:
    """Every name and alias in the order of the table, or those that a model with this TransformerConfig can have."""
    rows = [row for row in MODULES if config is None or _can_have(config, row)]
    return [name for row in rows for name in (row.name, *row.aliases)]


def canonical_names(names: Iterable[str], config: Any = None) -> tuple[str, ...]:
    """Names of the table for names or aliases, without repetitions, in the order of the table.

    Raises:
        ValueError: for an unknown name, or for one string instead of several.
    """
    if isinstance(names, str):
        raise ValueError(f"offload_modules must be a list of names, got the string {names!r}")
    wanted = {row_of(name, config).name for name in names}
    return tuple(row.name for row in MODULES if row.name in wanted)


def drop_parts(names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Separates names into those to bracket and those that lie inside a bracket asked for as well."""
    inside = {part for name in names for part in row_of(name).parts}
    return tuple(n for n in names if n not in inside), tuple(n for n in names if n in inside)


def whole_of(path: str) -> str | None:
    """The name whose groups are the calls of the submodule at `path` of a model; None: there is none."""
    calls = {bracket.path: row.name for row in MODULES for bracket in row.brackets if bracket.until is None}
    return next((name for call, name in calls.items() if f".{path}".endswith(f".{call}")), None)


def is_in_experts(name: str) -> bool:
    """Whether a place of this name is the experts themselves, or lies in them."""
    return any(f"{bracket.path}.".startswith(f"{EXPERTS}.") for bracket in row_of(name).brackets)


def unshared_rows(names: Iterable[str]) -> tuple[ModuleRow, ...]:
    """The rows that save no tensor which a bracket of these names saves, as far as that is known."""
    asked = frozenset(names)
    return tuple(r for r in MODULES if r.shares_with is not None and asked.isdisjoint((r.name, *r.shares_with)))


def _can_have(config: Any, row: ModuleRow) -> bool:
    path = row.brackets[0].path
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
