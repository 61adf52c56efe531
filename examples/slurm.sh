#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#SBATCH --job-name=offload
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --mem=0
#SBATCH --exclusive
# Pretrains on several nodes: one task a node, which starts a process for each GPU. Needs GPUs.
#
#   MEGATRON_LM=/path/to/Megatron-LM sbatch examples/slurm.sh [more flags]
#
# --mem=0 is all of the node's memory: what is offloaded is pinned there, in equal shares for the ranks of the node. They
# find the CPUs near their GPUs by themselves, so that srun must not bind (docs/many_nodes.md).
set -euo pipefail
export GPUS_PER_NODE=${SLURM_GPUS_ON_NODE:-8} NNODES=$SLURM_NNODES
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts%%$'\n'*} # not by head, at which scontrol may die of a closed pipe
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-29500}
here=${SLURM_SUBMIT_DIR:-$PWD}
srun --kill-on-bad-exit=1 --cpu-bind=none bash -c \
    'NODE_RANK=$SLURM_PROCID exec "$0" --offload-cpu-affinity "$@"' "$here/examples/megatron_lm.sh" "$@"
