#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Creates the virtual environment with the tested versions of a constraints file. A second run finds it and does nothing.
#
#   tools/setup_env.sh [EXTRAS]      extras of pyproject.toml, comma-separated; default megatron,plots,test
#
# Environment:
#   PYTHON   interpreter to use; default python3.11, else the first of python3, python3.12, python3.13 that is new enough
#   VENV     where to put the environment; default .venv in the repository
#   CONSTRAINTS  the versions; default constraints-py311.txt or constraints-py312.txt, by the interpreter
#   TE_WHEELS  a directory holding a built transformer_engine_torch wheel, for the extra "te"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=${1:-megatron,plots,test}
venv=${VENV:-.venv}

die() {
    echo "setup_env: $*" >&2
    exit 1
}

is_usable() { # a shim on PATH may stand for an interpreter that is not there, so it has to run
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in python3.11 python3 python3.12 python3.13; do
        if is_usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "no Python >= 3.11 with the venv module on PATH (looked for python3.11, python3, python3.12, python3.13)." \
        "Install one (Debian: apt-get install python3 python3-venv) or name it: PYTHON=/path/to/python $0"
}

sha256() { # macOS has no sha256sum
    if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

if [ -n "${PYTHON:-}" ]; then
    is_usable "$PYTHON" || die "PYTHON=$PYTHON does not run, is older than 3.11 or lacks the venv module"
    python=$PYTHON
else
    python=$(find_python)
fi
version=$(version_of "$python")
case $version in
    3.11) constraints=${CONSTRAINTS:-constraints-py311.txt} ;;
    *) constraints=${CONSTRAINTS:-constraints-py312.txt} ;;
esac

# The stamp changes with everything that decides what is installed, and is written last.
stamp=$venv/.installed-$(cat setup.py pyproject.toml "$constraints" <(echo "$extras $version ${TE_WHEELS:+te}") | sha256 | cut -c1-16)
if [ -e "$stamp" ] && [ -x "$venv/bin/python" ]; then
    exit 0
fi

echo "setup_env: installing [$extras] into $venv (Python $version, $constraints); once, a minute or two where pip finds" \
    "torch without CUDA (PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu), longer with its 3 GB"
started=$SECONDS
if [ ! -x "$venv/bin/python" ]; then
    "$python" -m venv "$venv"
elif [ "$(version_of "$venv/bin/python")" != "$version" ]; then
    "$python" -m venv --clear "$venv"
fi
find_links=() # expanded with care below: to bash before 4.4, as on macOS, an empty array is an unbound variable
if [ -n "${TE_WHEELS:-}" ]; then
    find_links=(--find-links "$TE_WHEELS" --only-binary transformer_engine_torch)
fi
progress=(--progress-bar off) # a line for each package
if [ -t 1 ]; then progress=(--progress-bar on); fi
"$venv/bin/python" -m pip install --no-compile ${progress[@]+"${progress[@]}"} --disable-pip-version-check --no-input \
    --constraint "$constraints" ${find_links[@]+"${find_links[@]}"} --editable ".[$extras]" ||
    die "pip could not install [$extras] with $constraints; its own message is above"
touch "$stamp"
echo "setup_env: done in $((SECONDS - started)) s"
