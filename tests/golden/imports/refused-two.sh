#!/bin/bash
COMMON="--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024"
COMMON="$COMMON --max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 64 --bf16"
for TP in 1 2; do
    torchrun --nproc_per_node 8 pretrain_gpt.py $COMMON --tensor-model-parallel-size $TP
done
