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

# Bottom first. A module imports only what stands in front of it; typing imports count too. A name is dotted, without
# the package's; "." is the package itself.
LAYERS = {
    "offload_engine": """
        meter output counted policies schedule sizes gpu_budget traits stats planning planning.moves planning.segments
        _compat _compat.build _compat.smp _compat.te_base _compat.torch_private
        _compat.tensor_reads _compat._tensor_reads _compat.reads _compat.own_hooks config planning.clocks
        planning.shapes planning.hardware planning.choices planning.allocations planning.saved_plan
        planning.copy_ins planning.plan
        planning.budget planning.chosen planning.releases planning.planner planning.recompute planning.residents
        planning.other_bytes planning.memory _devices._cuda_calls _devices.regions _devices.base
        _devices.cuda_calls errors _observe
        _observe.labels _observe.modules _observe.pace _observe.reasons _observe.record _observe.chrome_trace
        _observe.fold _observe.notes _observe.assemble _observe.pending _observe.report _observe.storages
        _observe.goals _observe.recorder _observe.gathering report _observe.waits _observe.observer
        _devices.copy_worker _devices.cuda_trace _devices.cuda_shortage _devices.cuda_memory _devices.cuda_runtime
        _devices.cuda_routine _devices.host_memory _devices.file_slab _devices.memory_slab _devices.node_share
        _devices.pinned _devices.affinity _devices.host_read _devices.cpu _devices.cuda _devices _host
        _host.try_lock _host.unawaited _host.extents planning.host_bytes planning.simulated planning.simulate
        planning.slowed planning.pipeline planning.steps planning.reduced planning.performed planning.replay
        planning.fitted planning.frontier planning.predict planning.worth planning.by_name planning.choose
        planning.shortened
        _host.slabs _host.pool _host.leases _saved _saved.places _saved.storage _saved.alloc_streams
        _saved.failures _saved.retirement _saved.counters _saved.handles _saved.unpacked _saved.eligibility
        _saved.quantized _saved.transfers _captured _captured.graphs _captured.saves _captured.share
        _captured.slots _captured.program _captured.recording _captured.replays captured_layers _saved.abandon
        _saved.mover _saved.group_moves _saved.store tracker _chunk _chunk.progress _chunk.group_stack
        _chunk.saved_tensors _policy _policy.horizon _policy.leaving _policy.share _policy.window _policy.policy
        _policy.reactive _policy.lowest_peak _policy.resident _policy.shape_log _policy.planned _policy.keeping
        _policy.choose _policy.executor _budget _budget.gauge _budget.link _budget.allocations _budget.measure
        _budget.module_runs _budget.optimizers group_boundaries chunk _budget.last_step _budget.margin
        _budget.state _budget.agreement _budget.allowing _budget.shortage _budget.summary _budget.times
        _budget.idleness _budget.floor _budget.garbage _budget.hold_times _budget.arenas _budget.own_groups
        _budget.replayed_choice _budget.known _budget.learn _budget.taken _budget.stages _budget.decide
        _budget.first _budget.in_force
        _budget.tables _budget.picture _budget.hold _budget.verify _budget.view rank_reports
        _budget.controller engine_view identities functions graph_captures engine plan_files rehearsal
        rehearsal.allocated rehearsal.attention rehearsal.costs rehearsal.failures rehearsal.operators
        rehearsal.progress rehearsal.share rehearsal.device rehearsal.forecast rehearsal.recorded rehearsal.options
        rehearsal.tensors rehearsal.engine rehearsal.tables rehearsal.chosen rehearsal.curve rehearsal.shapes
        frontends._common frontends._common.compiling frontends._common.weights frontends._common.device
        frontends._common.recording frontends._common.session frontends._common.groups frontends._layers
        frontends._layers.exclusions frontends._layers.find_layers frontends._layers.caches
        frontends._layers.group_hooks frontends._layers.layer_host frontends._layers.layer_groups
        frontends._layers.layer_checkpoint frontends._layers.recomputable frontends._layers.marked_layers
        frontends._layers.recompute_choice frontends frontends.checkpoint frontends.any_model frontends.layers
        frontends.wrapper frontends.integrations frontends.integrations._reporters
        frontends.integrations._training frontends.integrations.lightning frontends.integrations.pipelining
        frontends.integrations.transformers rehearsal.model plan .
    """,
    "megatron_patches": """
        _take_over _versions _model _model.host_claims _model.modules _model.whole_steps _model.sites
        _model.thresholds _flags _model.experts _model.fsdp _model.gpu_budget _model.graphs _model.peers
        _model.recompute _model.unshared _model.validate _model.candidates _model.recompute_options _hooks
        _hooks.bracket _hooks.held _hooks.module_hooks _hooks.nodes _hooks.recomputed _hooks.attach _rows
        _rows.host_reads _rows.registry _rows.runtime _rows.fsdp _rows.full_graphs _rows.fused_wgrad
        _rows.host_claims _rows.moe _rows.overlap _rows.recompute _rows.schedules _rows.without_gpu
        _rows.cpu_fsdp _rows.cpu _arguments _budget_log _captures _check _command_line _plan_files
        _second_step _training_log _runtime _handle . _rehearsal _rehearsal.job _rehearsal.kernels _rehearsal.modules
        _rehearsal.building _rehearsal.script _rehearsal.rows _rehearsal.stage _rehearsal.forecast
        _rehearsal.command __main__
    """,
}


# A string that names a module of an optional package is an import in the making (`importlib.import_module`).
OPTIONAL_MODULE = re.compile(r"(megatron|transformer_engine|apex)(\.\w+)+")


class Import(NamedTuple):
    module: str  # absolute, dotted: the module itself, or module.name of `from module import name`
    line: int


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
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = _resolve(node, module, is_package)
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and OPTIONAL_MODULE.fullmatch(node.value):
            yield Import(node.value, node.lineno)


def _all_imports(package: str) -> Iterator[tuple[str, Import]]:
    for module, path in _sources(package).items():
        for found in _imports(path.read_text(), module, path.name == "__init__.py"):
            yield module, found


def _place(package: str, imported: str, modules: dict[str, Path]) -> str:
    """Return the module of `package` that `imported` (a module, or a name in one) stands for, as `LAYERS` has it."""
    while imported not in modules:
        imported = imported.rpartition(".")[0]
    return imported.removeprefix(package).lstrip(".") or "."


@pytest.mark.parametrize(
    ("package", "others"),
    [
        ("offload_engine", "tests tools benchmarks examples megatron_patches megatron"),
        ("megatron_patches", "tests tools benchmarks examples transformer_engine"),
    ],
)
def test_what_a_package_must_not_import(package: str, others: str) -> None:
    wrong = [f"{m}:{i.line} {i.module}" for m, i in _all_imports(package) if i.module.split(".")[0] in others.split()]
    assert not wrong


def test_only_the_seam_imports_transformer_engine() -> None:
    found = {m for m, i in _all_imports("offload_engine") if i.module.split(".")[0] == "transformer_engine"}
    assert found == {"offload_engine._compat.te_base"}


def test_megatron_patches_uses_public_names_only() -> None:
    """Private names of torch are the exception: both packages take them from one place."""
    wrong = [
        f"{module}:{found.line} {found.module}"
        for module, found in _all_imports("megatron_patches")
        if re.match(r"offload_engine\.(.*\.)?_", found.module)
        and not found.module.startswith("offload_engine._compat.torch_private")
    ]
    assert not wrong


@pytest.mark.parametrize("package", LAYERS)
def test_imports_inside_a_package_go_downward(package: str) -> None:
    modules, layers = _sources(package), LAYERS[package].split()
    assert sorted(layers) == sorted(_place(package, module, modules) for module in modules), "a place for each module"
    wrong = []
    for module, found in _all_imports(package):
        importer, inside = _place(package, module, modules), found.module.split(".")[0] == package
        target = _place(package, found.module, modules) if inside else importer
        if layers.index(target) > layers.index(importer):
            wrong.append(f"{module}:{found.line} imports {target}, which is not below it")
    assert not wrong, "\n".join(wrong)
