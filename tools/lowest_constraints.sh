#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Writes constraints-lowest.txt: the lowest version that pyproject.toml allows of each package it names, and of all others
# the newest that go with these. Needs uv; to be run after a change of a bound.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=(--extra megatron --extra integrations --extra plots --extra test)
{
    echo "# The lowest versions of pyproject.toml, on Python 3.11. Written by tools/lowest_constraints.sh."
    # What torch needs of CUDA is pinned by torch, and differs by the build.
    uv pip compile --quiet --python-version 3.11 --resolution lowest-direct ${extras[@]+"${extras[@]}"} \
        --no-annotate --no-header --no-emit-package setuptools pyproject.toml | grep -vE '^(nvidia-|triton)'
} >constraints-lowest.txt.new
mv constraints-lowest.txt.new constraints-lowest.txt
