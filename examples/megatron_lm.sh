#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Pretrains a GPT with stock Megatron-LM on the GPUs of this node, offloaded within a budget. Needs GPUs.
#
#   MEGATRON_LM=/path/to/Megatron-LM examples/megatron_lm.sh [more flags of pretrain_gpt.py or of the offload]
#
# The checkout is a release that the patches know (git checkout core_v0.19.0). BUDGET is what each process may hold on its
# GPU (default 90%). To name modules in its place: OFFLOAD="--offload-activation --offload-modules core_attn qkv_linear".
set -euo pipefail
megatron=${MEGATRON_LM:?set MEGATRON_LM to a checkout of Megatron-LM}
gpus=${GPUS_PER_NODE:-$(nvidia-smi --list-gpus | wc -l)}
read -r -a offload <<<"${OFFLOAD:---offload-gpu-budget ${BUDGET:-90%}}"

cd "$megatron"
exec torchrun --nproc-per-node "$gpus" --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" \
    -m megatron_patches "${offload[@]}" \
    pretrain_gpt.py \
    --use-mcore-models --transformer-impl transformer_engine --bf16 \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear \
    --position-embedding-type rope --rotary-base 500000 --untie-embeddings-and-output-weights \
    --seq-length "${SEQ_LENGTH:-32768}" --max-position-embeddings "${SEQ_LENGTH:-32768}" \
    --tensor-model-parallel-size "${TP:-1}" --pipeline-model-parallel-size "${PP:-$gpus}" \
    --micro-batch-size 1 --global-batch-size "${GLOBAL_BATCH_SIZE:-64}" --train-iters "${STEPS:-100}" \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 \
    --mock-data --tokenizer-type NullTokenizer --vocab-size 128000 \
    --log-interval 10 --eval-iters 0 --eval-interval 1000 "$@"
