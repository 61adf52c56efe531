#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The checks that take hours: 10,000 random pipelines, 5,000 interrupts, 2,000 steps of each front-end, every mutation,
# and all tests of megatron-core with its oldest version, of which CI runs a part.
# A mutation check that was stopped goes on where it was: what is caught is in out/mutations.jsonl.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv-py312/bin/python}
oldest=${OLDEST:-.venv/bin/python}
jobs=${JOBS:-$(nproc)}
export PYTHONPATH=$PWD OMP_NUM_THREADS=1
mkdir -p out

"$oldest" -m pytest -q -n "$jobs" --dist worksteal tests/dist
RANDOM_PIPELINE_BATCHES=400 "$python" -m pytest -q -n "$jobs" --dist worksteal tests/cpu/test_random_pipelines.py
"$python" tools/interrupt_check.py -j "$jobs"
"$python" tools/soak.py
"$python" tools/mutation_check.py --all -j "$jobs" --results out/mutations.jsonl
