#!/bin/bash
sizes() {
    echo "--num-layers $1 --hidden-size $2 --num-attention-heads $3"
}

start() {
    local gpus=$1
    shift
    torchrun --standalone --nproc_per_node "$gpus" "$@"
}

function experts {
    EXPERTS=(--num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall)
    EXPERTS+=(--moe-grouped-gemm --moe-permute-fusion --expert-model-parallel-size "$1" --expert-tensor-parallel-size 1)
}

experts 4
start 8 pretrain_gpt.py $(sizes 32 4096 32) "${EXPERTS[@]}" \
    --ffn-hidden-size 14336 --group-query-attention --num-query-groups 8 \
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear \
    --untie-embeddings-and-output-weights --hidden-dropout 0.0 --attention-dropout 0.0 \
    --seq-length 4096 --max-position-embeddings 32768 \
    --tokenizer-type NullTokenizer --vocab-size 31999 --make-vocab-size-divisible-by 1 --mock-data \
    --tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 1 --global-batch-size 16 \
    --bf16 --use-distributed-optimizer --lr 1e-4 --train-iters 10
