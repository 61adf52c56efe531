#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The checks that take hours: all tests of megatron-core with its oldest version, of which CI runs a part; the lowest
# versions of all dependencies; 10,000 random pipelines; 5,000 interrupts; 2,000 steps of each front-end; which lines no
# test runs (out/coverage.txt); every mutation. Each runs whatever became of those before it; the last lines name those
# that failed.
# A mutation check that was stopped goes on where it was: what is caught is in out/mutations.jsonl.
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

step() { # COMMAND
    printf '\n==== %s (%d s) ====\n' "$*" "$SECONDS"
    "$@" || failed="$failed"$'\n'"failed: $*"
}

measure_coverage() {
    rm -f out/coverage/*
    "$python" -m coverage run -m pytest -q -n "$jobs" --dist worksteal tests/cpu tests/dist
    local status=$?
    "$python" -m coverage combine -q && "$python" -m coverage report >out/coverage.txt && tail -n 1 out/coverage.txt &&
        return "$status"
}

parallel=(-q -n "$jobs" --dist worksteal)
step "$oldest" -m pytest ${parallel[@]+"${parallel[@]}"} tests/dist
step env PYTHON="${PYTHON311:-python3.11}" VENV=.venv-lowest EXTRAS=megatron,integrations,plots,test \
    CONSTRAINTS=constraints-lowest.txt tools/test.sh ${parallel[@]+"${parallel[@]}"} tests/cpu tests/dist \
    -m "not dist or compat"
step env RANDOM_PIPELINE_BATCHES=400 "$python" -m pytest ${parallel[@]+"${parallel[@]}"} tests/cpu/test_random_pipelines.py
step "$python" tools/interrupt_check.py -j "$jobs"
step "$python" tools/soak.py
step measure_coverage
step "$python" tools/mutation_check.py --all -j "$jobs" --results out/mutations.jsonl
printf '%s\n' "${failed:-all passed}"
[ -z "$failed" ]
