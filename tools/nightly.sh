#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The checks that take hours: all tests of megatron-core with its oldest version, of which CI runs a part; the lowest
# versions of all dependencies; 10,000 random pipelines; interrupts at each byte code of some functions, and 5,000 at
# random; 2,000 steps of each front-end; which lines no test runs (out/coverage.txt); every mutation. Each runs whatever
# became of those before it; the last lines name those that failed.
# A mutation check that was stopped goes on where it was: what is caught is in out/mutations.jsonl.
# FEW=1 runs a few of each, in some minutes: no part should fail at night for a reason that this shows.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv-py312/bin/python} # the environments of .ci/run
oldest=${OLDEST:-.venv/bin/python}
jobs=${JOBS:-$(nproc)}
export PYTHONPATH=$PWD OMP_NUM_THREADS=1
mkdir -p out/coverage
for cuda in "$(dirname "$python")"/../lib/python*/site-packages/nvidia/cu13; do # for TransformerEngine, as in tools/test.sh
    [ ! -d "$cuda" ] || export CUDA_HOME="${CUDA_HOME:-$(cd "$cuda" && pwd)}"
done
failed=""

cpu=(tests/cpu) dist=(tests/dist) batches=400 interrupts=5000 steps=2000 mutations=(--all)
if [ -n "${FEW:-}" ]; then
    cpu=(tests/cpu/test_host_pool.py) dist=(tests/dist/test_weights.py)
    batches=2 interrupts=100 steps=16 mutations=(--sample 4)
fi

step() { # COMMAND
    printf '\n==== %s (%d s) ====\n' "$*" "$SECONDS"
    "$@" || failed="$failed"$'\n'"failed: $*"
}

measure_coverage() {
    rm -f out/coverage/*
    "$python" -m coverage run -m pytest -q -n "$jobs" --dist worksteal "${cpu[@]}" "${dist[@]}"
    local status=$?
    "$python" -m coverage combine -q && "$python" -m coverage report >out/coverage.txt && grep ^TOTAL out/coverage.txt &&
        return "$status"
}

parallel=(-q -n "$jobs" --dist worksteal)
step "$oldest" -m pytest ${parallel[@]+"${parallel[@]}"} "${dist[@]}"
step env PYTHON="${PYTHON311:-python3.11}" VENV=.venv-lowest EXTRAS=megatron,integrations,plots,test \
    CONSTRAINTS=constraints-lowest.txt tools/test.sh ${parallel[@]+"${parallel[@]}"} "${cpu[@]}" \
    "${dist[@]}" -m "not dist or compat"
step env RANDOM_PIPELINE_BATCHES="$batches" RANDOM_INTERRUPTS="$interrupts" SOAK_STEPS="$steps" "$python" -m pytest \
    ${parallel[@]+"${parallel[@]}"} tests/cpu/test_random_pipelines.py tests/cpu/test_random_interrupts.py \
    tests/cpu/test_soak.py
step measure_coverage
step "$python" tools/mutation_check.py "${mutations[@]}" -j "$jobs" --results out/mutations.jsonl
printf '%s\n' "${failed:-all passed}"
[ -z "$failed" ]
