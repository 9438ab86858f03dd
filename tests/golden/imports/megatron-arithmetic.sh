#!/bin/bash
NODES=8 PER_NODE=8
let WORLD=NODES*PER_NODE
TP=$(( 2 ** 2 ))
PP=$[ 3 - 1 ]
DP=$((WORLD / (TP * PP)))
MICRO=$(( DP > 4 ? 2 : 1 ))
STEPS=$((1 << 3))
GLOBAL=$((DP * MICRO * STEPS))
HEADS=64
WIDTH=$((HEADS * 128))
printf 'world %d, %d sequences\n' $WORLD $GLOBAL

torchrun --nnodes=$NODES --nproc-per-node=$PER_NODE -- pretrain_gpt.py \
    --num-layers 80 --hidden-size $WIDTH --ffn-hidden-size $((7 * WIDTH / 2)) --num-attention-heads $HEADS \
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm \
    --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights \
    --hidden-dropout 0.0 --attention-dropout 0.0 --seq-length $((8 * 1024)) --max-position-embeddings 8192 \
    --tokenizer-type NullTokenizer --vocab-size 128255 --mock-data --lr 1e-4 --train-iters 10 \
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --sequence-parallel \
    --micro-batch-size $MICRO --global-batch-size $GLOBAL --bf16 --use-distributed-optimizer
