#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Pretrains a small MoE GPT on real text in a pipeline of two processes with two virtual stages each, without activation
# offload, with it, and with nothing but a budget, on this machine's CPU, and compares the three runs. Needs
# Python >= 3.11 and nothing else.
#
#   tools/quickstart.sh [DIRECTORY]    where the metrics go; default out/quickstart
#
# STEPS (default 4) sets the length of the first two runs; a budget needs six steps. PYTHON and VENV choose the
# environment, see tools/setup_env.sh.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-out/quickstart}
steps=${STEPS:-3}
case $steps in '' | 0 | *[!0-9]*) echo "quickstart: STEPS=$steps is no number of steps" >&2; exit 2 ;; esac
budget=${BUDGET:-125MiB} # of saved tensors, as there is no GPU
budget_steps=$((steps > 6 ? steps : 6)) # of which four measure and one verifies
python=${VENV:-.venv}/bin/python

tools/setup_env.sh megatron,plots,test
mkdir -p "$out"

unset PYTHONDONTWRITEBYTECODE # some containers set it: each process would compile all modules that it imports
# Also where there are GPUs: of one, two processes could not have one each.
export CUDA_VISIBLE_DEVICES=""
# One thread a process: the two stages of the pipeline share the cores.
export OMP_NUM_THREADS=1
# Nothing is compiled here, and to import the compiler takes each process a second or two.
export TORCHDYNAMO_DISABLE=1
# In both runs, big tensors come from the system and go back to it at once (glibc otherwise keeps freed blocks of up to
# 32 MiB, and the size of the process says little about what is alive), in huge pages where the system has them.
export GLIBC_TUNABLES=glibc.malloc.mmap_threshold=1048576:glibc.malloc.hugetlb=1

pretrain() { # NAME STEPS [FLAGS]: one run; its metrics land in $out/NAME.jsonl
    local name=$1 steps=$2
    shift 2
    "$python" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2 \
        examples/pretrain_gpt.py \
        --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 \
        --num-layers 8 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 16 --seq-length 256 \
        --num-experts 4 --moe-router-topk 2 --moe-layer-freq 2 --disable-bias-linear \
        --micro-batch-size 2 --global-batch-size 4 --train-iters "$steps" --seed 1234 \
        --lr-decay-iters "$budget_steps" --metrics-json "$out/$name.jsonl" "$@"
}

echo "1/3 without offload"
pretrain plain "$steps"
echo "2/3 with --offload-activation --offload-modules core_attn router_fc1 qkv_linear"
pretrain offload "$steps" --offload-activation --offload-modules core_attn router_fc1 qkv_linear
echo "3/3 with --offload-gpu-budget $budget"
pretrain budget "$budget_steps" --offload-gpu-budget "$budget"

exec "$python" tools/quickstart.py "$out"
