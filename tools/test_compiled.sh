#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the compiled core in a copy of the checkout and runs tests there. Arguments go to pytest; default all of
# tests/cpu, two at a time. VENV is an environment with the extras "test" and "dev" (see tools/setup_env.sh).
# COMPILED_COPY=DIR, an empty one, keeps the copy for the next call; --build alone builds it and runs no test.
# OFFLOAD_ENGINE_OPTIMIZE=0 builds in half the time, see setup.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(cd "${VENV:-.venv}" && pwd)/bin/python
copy=${COMPILED_COPY:-$(mktemp -d)}
[ -n "${COMPILED_COPY:-}" ] || trap 'rm -rf "$copy"' EXIT

if [ ! -d "$copy/build/installed" ]; then
    # Files alone, which git knows or would add: folders change while other checks run beside this.
    git ls-files -z --cached --others --exclude-standard | tar -c -f - --null --no-recursion -T - | tar -x -f - -C "$copy"
    # What is installed of the copy, compiled modules included, goes over the copy.
    OFFLOAD_ENGINE_COMPILE=1 "$python" -m pip install -qq --disable-pip-version-check --no-input --progress-bar off \
        --no-deps --no-build-isolation --target "$copy/build/installed" "$copy"
    cp -r "$copy/build/installed/." "$copy"
fi
[ "${1:-}" != --build ] || exit 0

export OFFLOAD_TESTS_EXPECT_COMPILED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
cd "$copy"
[ $# -gt 0 ] || set -- tests/cpu -n 2 --dist worksteal
"$python" -m pytest "$@"
