# SPDX-License-Identifier: Apache-2.0
"""Checks the layers of imports, read from the source by `ast`, so that nothing has to be importable here.

tools, examples, tests -> megatron_patches -> offload_engine, and inside offload_engine only downward in `LAYERS`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

# Bottom first. A module imports from rows below its own only, and none of its own row; typing imports count too. A name
# is dotted, without the package's; "" is the package itself.
LAYERS = {
    "offload_engine": (
        ("schedule", "meter", "policies", "sizes", "traits"),
        ("stats",),
        ("planning", "planning.moves"),
        ("_compat", "_compat.build", "_compat.smp", "_compat.te_base", "_compat.torch_private"),
        ("_compat.tensor_reads",),
        ("_compat._tensor_reads",),
        ("_compat.reads",),
        ("_compat.own_hooks",),
        ("config",),
        ("planning.shapes", "planning.clocks"),
        ("planning.hardware",),
        ("planning.choices",),
        ("planning.saved_plan",),
        ("planning.plan", "planning.copy_ins"),
        ("planning.budget", "planning.releases", "planning.chosen"),
        ("planning.planner", "planning.recompute"),
        ("planning.residents",),
        ("planning.memory",),
        ("_devices._cuda_calls", "_devices.regions"),
        ("_devices.base",),
        ("_devices.cuda_calls",),
        ("errors",),
        ("_observe", "_observe.labels", "_observe.modules", "_observe.pace", "_observe.reasons"),
        ("_observe.record",),
        ("_observe.notes", "_observe.fold", "_observe.chrome_trace"),
        ("_observe.assemble", "_observe.pending", "_observe.storages", "_observe.report"),
        ("_observe.recorder", "_observe.goals", "rank_reports", "report"),
        ("_observe.waits",),
        ("_observe.observer",),
        ("_devices.host_memory", "_devices.copy_worker", "_devices.cuda_runtime", "_devices.cuda_memory"),
        ("_devices.file_slab", "_devices.memory_slab", "_devices.node_share", "_devices.pinned"),
        ("_devices.affinity", "_devices.host_read"),
        ("_devices.cpu", "_devices.cuda"),
        ("_devices",),
        ("_host", "_host.unawaited", "_host.try_lock"),
        ("_host.extents",),
        ("planning.host_bytes",),
        ("planning.simulated",),
        ("planning.simulate",),
        ("planning.steps",),
        ("planning.predict",),
        ("planning.worth",),
        ("planning.choose",),
        ("_host.slabs",),
        ("_host.pool",),
        ("_host.leases",),
        ("_saved", "_saved.places"),
        ("_saved.storage",),
        ("_saved.alloc_streams", "_saved.failures"),
        ("_saved.retirement",),
        ("_saved.handles", "_saved.counters"),
        ("_saved.quantized", "_saved.eligibility"),
        ("_saved.transfers",),
        ("_captured", "_captured.graphs", "_captured.saves", "_captured.slots"),
        ("_captured.program",),
        ("_captured.recording", "_captured.replays"),
        ("captured_layers",),
        ("_saved.mover", "_saved.abandon"),
        ("_saved.group_moves",),
        ("_saved.store", "tracker"),
        ("_chunk", "_chunk.progress"),
        ("_chunk.group_stack",),
        ("_chunk.saved_tensors",),
        ("_policy", "_policy.leaving", "_policy.horizon", "_policy.window", "_policy.share"),
        ("_policy.policy",),
        ("_policy.reactive",),
        ("_policy.lowest_peak", "_policy.resident", "_policy.shape_log"),
        ("_policy.planned",),
        ("_policy.keeping",),
        ("_policy.choose", "_policy.executor"),
        ("chunk", "_budget", "_budget.gauge", "_budget.link", "_budget.measure", "_budget.optimizers"),
        ("_budget.last_step", "_budget.margin", "_budget.state"),
        ("_budget.times", "_budget.agreement", "_budget.allowing", "_budget.shortage", "_budget.summary"),
        ("_budget.taken", "_budget.learn", "_budget.idleness"),
        ("_budget.decide",),
        ("_budget.verify",),
        ("_budget.view",),
        ("_budget.controller",),
        ("functions", "engine_view", "graph_captures"),
        ("engine", "plan_files"),
        (
            "rehearsal",
            "rehearsal.allocated",
            "rehearsal.attention",
            "rehearsal.operators",
            "rehearsal.costs",
            "rehearsal.progress",
        ),
        ("rehearsal.tensors", "rehearsal.device", "rehearsal.forecast", "rehearsal.options"),
        ("rehearsal.engine", "rehearsal.tables"),
        ("rehearsal.shapes", "rehearsal.chosen"),
        ("frontends._common", "frontends._common.compiling", "frontends._common.weights"),
        ("frontends._common.device", "frontends._common.recording", "frontends._common.session"),
        ("frontends._common.groups",),
        ("frontends._layers", "frontends._layers.find_layers", "frontends._layers.exclusions"),
        ("frontends._layers.caches",),
        ("frontends._layers.group_hooks",),
        ("frontends._layers.layer_groups",),
        ("frontends._layers.layer_checkpoint",),
        ("frontends._layers.recomputable",),
        ("frontends._layers.recompute_choice",),
        ("frontends", "frontends.checkpoint"),
        ("frontends.any_model", "frontends.layers", "frontends.wrapper"),
        ("frontends.integrations", "frontends.integrations._reporters", "frontends.integrations._training"),
        (
            "frontends.integrations.lightning",
            "frontends.integrations.pipelining",
            "frontends.integrations.transformers",
        ),
        ("rehearsal.model",),
        ("plan",),
        ("",),
    ),
    "megatron_patches": (
        ("_take_over", "_versions"),
        ("_model", "_model.modules", "_model.whole_steps", "_model.host_claims"),
        ("_model.sites", "_thresholds"),
        ("_flags",),
        (
            "_model.unshared",
            "_model.experts",
            "_model.fsdp",
            "_model.graphs",
            "_model.gpu_budget",
            "_model.peers",
            "_model.recompute",
            "_model.validate",
        ),
        ("_model.candidates", "_model.recompute_options"),
        ("_hooks", "_hooks.bracket", "_hooks.held"),
        ("_hooks.module_hooks", "_hooks.nodes", "_hooks.recomputed"),
        ("_hooks.attach",),
        ("_rows", "_rows.registry", "_rows.host_reads", "_rows.runtime"),
        (
            "_rows.full_graphs",
            "_rows.schedules",
            "_rows.overlap",
            "_rows.recompute",
            "_rows.moe",
            "_rows.fused_wgrad",
            "_rows.fsdp",
            "_rows.host_claims",
            "_rows.without_gpu",
        ),
        ("_rows.cpu_fsdp",),
        ("_rows.cpu",),
        ("_arguments", "_captures", "_check", "_command_line", "_plan_files", "_second_step", "_training_log"),
        ("_runtime",),
        ("_handle",),
        ("",),
        ("_rehearsal", "_rehearsal.kernels", "_rehearsal.job"),
        ("_rehearsal.modules", "_rehearsal.script", "_rehearsal.building"),
        ("_rehearsal.rows",),
        ("_rehearsal.stage",),
        ("_rehearsal.forecast",),
        ("_rehearsal.command",),
        ("__main__",),
    ),
}


# A string that names a module of an optional package is an import in the making (`importlib.import_module`).
OPTIONAL_MODULE = re.compile(r"(megatron|transformer_engine|apex)(\.\w+)+")


class Import(NamedTuple):
    module: str  # absolute, dotted: the module itself, or module.name of `from module import name`
    line: int
    is_typing_only: bool  # inside `if TYPE_CHECKING:`, where a back reference is allowed


def _sources(package: str) -> dict[str, Path]:
    """Map dotted module names to files."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py*")):
        if path.suffix not in (".py", ".pyi"):  # of an extension module, what its stub says
            continue
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _resolve(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, node.module] if node.module else base)


def _imports(source: str, module: str, is_package: bool = False) -> Iterator[Import]:
    tree = ast.parse(source)
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, id(node) in typing_only)
        elif isinstance(node, ast.ImportFrom):
            base = _resolve(node, module, is_package)
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno, id(node) in typing_only)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and OPTIONAL_MODULE.fullmatch(node.value):
            yield Import(node.value, node.lineno, id(node) in typing_only)


def _all_imports(package: str) -> Iterator[tuple[str, Import]]:
    for module, path in _sources(package).items():
        for found in _imports(path.read_text(), module, path.name == "__init__.py"):
            yield module, found


def _top(name: str) -> str:
    return name.split(".", 1)[0]


def _layer(package: str, module: str) -> int | None:
    """Return the row of `module` (dotted, without the package's name) in `LAYERS`."""
    return next((row for row, names in enumerate(LAYERS[package]) if module in names), None)


def _local(package: str, imported: str, modules: dict[str, Path]) -> str | None:
    """Return the module of `package` that `imported` (a module, or a name in one) stands for."""
    while _top(imported) == package:
        if imported in modules:
            return imported.removeprefix(package).lstrip(".")
        imported = imported.rpartition(".")[0]
    return None


def test_offload_engine_knows_nothing_of_megatron() -> None:
    wrong = [f"{m}:{i.line} {i.module}" for m, i in _all_imports("offload_engine") if "megatron" in _top(i.module)]
    assert not wrong


def test_only_the_seam_imports_transformer_engine() -> None:
    packages = ("offload_engine", "megatron_patches")
    users = {m for p in packages for m, i in _all_imports(p) if _top(i.module) == "transformer_engine"}
    assert users <= {"offload_engine._compat.te_base"}


def test_megatron_patches_uses_public_names_only() -> None:
    """Private names of torch are the exception: both packages take them from one place."""
    wrong = [
        f"{module}:{found.line} {found.module}"
        for module, found in _all_imports("megatron_patches")
        if _top(found.module) == "offload_engine"
        and any(p.startswith("_") for p in found.module.split("."))
        and not found.module.startswith("offload_engine._compat.torch_private")
    ]
    assert not wrong


@pytest.mark.parametrize("package", ["offload_engine", "megatron_patches"])
def test_packages_import_no_tests_tools_or_examples(package: str) -> None:
    outside = {"tests", "tools", "benchmarks", "examples"} | (
        {"megatron_patches"} if package == "offload_engine" else set()
    )
    wrong = [f"{m}:{i.line} {i.module}" for m, i in _all_imports(package) if _top(i.module) in outside]
    assert not wrong


@pytest.mark.parametrize("package", LAYERS)
def test_imports_inside_a_package_go_downward(package: str) -> None:
    modules = _sources(package)
    wrong = []
    for module, found in _all_imports(package):
        target = _local(package, found.module, modules)
        importer = module.removeprefix(package).lstrip(".")
        if target is None or target == importer:
            continue
        here, there = _layer(package, importer), _layer(package, target)
        if here is None or there is None:
            wrong.append(f"{module} or {package}.{target} has no row in LAYERS: give it one")
        elif there >= here:
            wrong.append(f"{module}:{found.line} imports {target}, which is not below it")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", LAYERS)
def test_every_row_names_modules_that_are_there(package: str) -> None:
    rows = [name for names in LAYERS[package] for name in names]
    modules = {module.removeprefix(package).lstrip(".") for module in _sources(package)}
    assert sorted(rows) == sorted(modules)


def _module_level_state(tree: ast.Module) -> Iterator[str]:
    """Names bound at module level to something that invites mutation: not a constant, not an alias, not a logger."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if _is_declaration(node) else []
        for target in targets:
            name = ast.unparse(target)
            mutable = isinstance(node.value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp))
            if mutable and name != "__all__" and not name.lstrip("_").isupper():
                yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"global {', '.join(node.names)}"


def _is_declaration(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and node.value is not None


@pytest.mark.parametrize("package", ["offload_engine", "megatron_patches"])
def test_no_state_at_module_level(package: str) -> None:
    found = {m: list(_module_level_state(ast.parse(p.read_text()))) for m, p in _sources(package).items()}
    assert not {m: names for m, names in found.items() if names}


def test_the_reader_itself() -> None:
    """A check that finds nothing proves nothing unless it can find."""
    source = (
        "from . import a\nfrom ..b import c\nimport megatron.core as m\n"
        "if TYPE_CHECKING:\n    from .engine import E\n"
        "def f():\n    import transformer_engine\n    importlib.import_module('megatron.y')\n"
        "cache = {}\nNAMES = ['a']\n"
    )
    found = {i.module: i.is_typing_only for i in _imports(source, "offload_engine.sub.mod")}
    assert found == {
        "offload_engine.sub.a": False,
        "offload_engine.b.c": False,
        "megatron.core": False,
        "offload_engine.sub.engine.E": True,
        "transformer_engine": False,
        "megatron.y": False,
    }
    assert [i.module for i in _imports("from .x import y", "offload_engine", is_package=True)] == ["offload_engine.x.y"]
    assert list(_module_level_state(ast.parse(source))) == ["cache"]
    assert _layer("offload_engine", "config") == 8 and _layer("offload_engine", "nonsense") is None
