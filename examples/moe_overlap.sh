#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Experts with the all-to-all of one microbatch beside the computation of another, with what they save offloaded: the
# trainer of this folder, on two GPUs or, without any, on CPUs (then without the overlap, which needs TransformerEngine).
#
#   examples/moe_overlap.sh [more flags of examples/pretrain_gpt.py]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
overlap=()
if command -v nvidia-smi >/dev/null && [ "$(nvidia-smi --list-gpus | wc -l)" -ge 2 ]; then
    overlap=(--bf16 --overlap-moe-expert-parallel-comm --delay-wgrad-compute --moe-grouped-gemm)
else
    echo "moe_overlap.sh: fewer than two GPUs: on CPUs, without the overlap" >&2
fi
exec torchrun --nproc-per-node 2 --standalone pretrain_gpt.py \
    --num-experts "${EXPERTS:-8}" --moe-router-topk 2 --expert-model-parallel-size 2 --disable-bias-linear \
    --moe-token-dispatcher-type alltoall ${overlap[@]+"${overlap[@]}"} \
    --offload-activation --offload-modules core_attn expert_fc1 "$@"
