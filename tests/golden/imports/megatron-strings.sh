#!/bin/bash
# Two nodes of eight; options kept in strings.
HOSTS=2
PER_HOST=8

LAUNCHER="torchrun --nnodes $HOSTS --nproc_per_node $PER_HOST --node_rank ${RANK_OF_NODE:-0}
    --master_addr ${FIRST_HOST:-node0} --master_port 12345"

SIZES="
    --num-layers 32 \
    --hidden-size 4096 \
    --ffn-hidden-size 14336 \
    --num-attention-heads 32 \
    --group-query-attention \
    --num-query-groups 8 \
    --seq-length 8192 \
    --max-position-embeddings 8192 \
    --position-embedding-type rope \
    --normalization RMSNorm \
    --swiglu \
    --disable-bias-linear \
    --untie-embeddings-and-output-weights \
    --hidden-dropout 0.0 \
    --attention-dropout 0.0
"
VOCABULARY="--tokenizer-type NullTokenizer --vocab-size 128255 --mock-data"

SPLIT="--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --sequence-parallel"
STEP="--micro-batch-size 2 --global-batch-size 48 --bf16 --recompute-activations"
STATES="--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
RATES="--lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --train-iters 2000 --clip-grad 1.0"

$LAUNCHER pretrain_gpt.py $SIZES $VOCABULARY $SPLIT $STEP $STATES $RATES --seed 7
