#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Supervised fine-tuning with verl on the GPUs of one host: layers checkpointed, their inputs offloaded by this engine.
#
#     examples/verl_sft.sh MODEL TRAIN.parquet [verl's own settings, as data.max_length=32768 ...]
#
# Needs verl 0.9 and GPUs. The same settings, with the prefix of the model in question, serve the actor and the critic
# of PPO: actor_rollout_ref.model.external_lib=with_verl actor_rollout_ref.model.enable_activation_offload=True.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: $0 MODEL TRAIN.parquet [settings of verl]" >&2
    exit 2
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
model=$1 train=$2
shift 2
export PYTHONPATH="$here:$(dirname "$here")${PYTHONPATH:+:$PYTHONPATH}" # with_verl.py, and the engine
exec torchrun --standalone --nproc-per-node "${GPUS:-$(nvidia-smi --list-gpus | wc -l)}" -m verl.trainer.sft_trainer \
    model.path="$model" model.external_lib=with_verl model.enable_activation_offload=True \
    model.enable_gradient_checkpointing=True data.train_files="$train" data.messages_key=messages \
    engine.strategy=fsdp2 trainer.logger='[console]' "$@"
