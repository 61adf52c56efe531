#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the test extras (once) and runs the tests, two at a time. Arguments go to pytest: tools/test.sh -k parity
# PYTHON, VENV, EXTRAS, CONSTRAINTS and TE_WHEELS choose the environment, see tools/setup_env.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${VENV:-.venv}
tools/setup_env.sh "${EXTRAS:-megatron,plots,test}"

# Ranks are processes: one thread each, or two ranks on two cores starve one another.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# TransformerEngine looks for the CUDA libraries of pip's nvidia packages here; harmless without it.
if [ -z "${CUDA_HOME:-}" ]; then
    for cuda in "$venv"/lib/python*/site-packages/nvidia/cu13; do
        if [ -d "$cuda" ]; then
            CUDA_HOME=$(cd "$cuda" && pwd)
            export CUDA_HOME
        fi
    done
fi
[ $# -gt 0 ] || set -- -n 2 --dist worksteal
exec "$venv/bin/python" -m pytest "$@"
