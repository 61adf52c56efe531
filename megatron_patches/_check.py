# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_patches --check`: finds rows of the table that the installed megatron-core would break."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final, NamedTuple

from packaging.version import Version

from megatron_patches._rows.registry import Patch, PatchError, locate, misfit
from megatron_patches._versions import SUPPORTED, is_in_range

KNOWN_TARGETS: Final = Path(__file__).with_name("known_targets.json")
"""The code of each target in the versions whose rows were read and tested, by target and version."""


class State(Enum):
    """What the installed megatron-core does to a row; the value is shown to users."""

    HOLDS = "holds"
    NOT_NEEDED = "not for this version"
    CHANGED = "code changed: read it"
    OTHER_ARGUMENTS = "may break: other arguments"
    MISSING = "BREAKS: target is gone"
    EXISTS = "BREAKS: exists already"

    @property
    def breaks(self) -> bool:
        """Return whether the row cannot be used, or only after a review."""
        return self in (State.OTHER_ARGUMENTS, State.MISSING, State.EXISTS)


class Code(NamedTuple):
    """What identifies the code of a target."""

    arguments: str
    digest: str
    """Hash of the source without comments, docstrings and layout."""


class Finding(NamedTuple):
    """The state of one row, and what differs."""

    row: Patch
    state: State
    detail: str = ""


Known = Mapping[str, Mapping[str, Sequence[str]]]


def read_known(path: Path = KNOWN_TARGETS) -> Known:
    """Return the code of all targets: by target and version, arguments and digest."""
    known: Known = json.loads(path.read_text())
    return known


def check_rows(rows: Iterable[Patch], version: str, known: Known) -> list[Finding]:
    """Compare the target of each row with the versions that were tested; nothing is patched.

    Args:
        rows: of the table.
        version: version of the installed megatron-core, which need not be supported.
        known: see `read_known`.
    """
    return [_check(row, version, known.get(row.target, {})) for row in rows]


def _check(row: Patch, version: str, known: Mapping[str, Sequence[str]]) -> Finding:
    if row.versions != SUPPORTED and not is_in_range(version, row.versions):
        return Finding(row, State.NOT_NEEDED, row.versions)
    try:
        owner, name = locate(row, version)
    except PatchError as error:
        return Finding(row, State.MISSING, str(error.__cause__))
    if fact := misfit(row, owner, name):
        return Finding(row, State.EXISTS if row.is_new else State.MISSING, f"{owner.__name__}.{name} {fact}")
    if row.is_new:
        return Finding(row, State.HOLDS)
    return _compare(row, code_of(getattr(owner, name)), [Code(*code) for code in known.values()])


def _compare(row: Patch, code: Code, known: Sequence[Code]) -> Finding:
    if code in known:
        return Finding(row, State.HOLDS)
    if not known:
        return Finding(row, State.CHANGED, "not among the known targets")
    if code.arguments not in (each.arguments for each in known):
        return Finding(row, State.OTHER_ARGUMENTS, f"{known[-1].arguments} is now {code.arguments}")
    return Finding(row, State.CHANGED)


def code_of(target: Any) -> Code:
    """Return what identifies the code of a function; empty for data and generated code."""
    function = inspect.unwrap(target)
    try:
        return Code(_names_of(inspect.signature(function)), _digest(inspect.getsource(function)))
    except (TypeError, OSError):
        return Code("", "")


def _names_of(signature: inspect.Signature) -> str:
    """Return the names of the arguments, without types and with "=" for those that have a default."""
    parts = []
    for each in signature.parameters.values():
        stars = "*" if each.kind is each.VAR_POSITIONAL else "**" if each.kind is each.VAR_KEYWORD else ""
        parts.append(stars + each.name + ("=" if each.default is not each.empty else ""))
    return f"({', '.join(parts)})"


def _digest(source: str) -> str:
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            del body[0]  # the docstring
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:12]


def accept(rows: Iterable[Patch], version: str, path: Path = KNOWN_TARGETS) -> None:
    """Add the code of all targets in the installed version to the known ones, after a review of the rows against it.

    Raises:
        PatchError: if a target is missing, in one line that names it; nothing is added then.
    """
    known = {target: dict(codes) for target, codes in read_known(path).items()} if path.exists() else {}
    release = Version(version).public  # without the commit that megatron-core adds in a clone
    for row in rows:
        if not row.is_new and is_in_range(version, row.versions):
            finding = _check(row, version, {})
            if finding.state is State.MISSING:
                raise PatchError(
                    f"--check accept: {row.target} is missing in megatron-core {version} ({finding.detail}), and has "
                    "no code to note: fix that row, or give it the versions that have the target, then accept again"
                )
            owner, name = locate(row, version)
            known.setdefault(row.target, {})[release] = list(code_of(getattr(owner, name)))
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def table_of(findings: Sequence[Finding], version: str, place: str) -> str:
    """Return the findings as text, what breaks first."""
    order = sorted(findings, key=lambda each: (not each.state.breaks, each.state is not State.CHANGED, each.row.target))
    lines = [f"{each.state.value:<28}{each.row.target}{_more(each)}" for each in order]
    breaks = sum(each.state.breaks for each in findings)
    return "\n".join(
        [*lines, f"megatron-core {version} in {place}: {breaks} of {len(findings)} rows break or may break"]
    )


def _more(finding: Finding) -> str:
    why = f"\n{'':<28}it is there because {finding.row.why}" if finding.state.breaks else ""
    return (f"\n{'':<28}{finding.detail}" if finding.detail else "") + why
