#!/bin/bash
torchrun --nnodes=2 --nproc_per_node=8 pretrain_gpt.py \
    --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params \
    --use-distributed-optimizer --ckpt-format fsdp_dtensor \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm \
    --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights \
    --hidden-dropout 0.0 --attention-dropout 0.0 --seq-length 8192 --max-position-embeddings 8192 \
    --tokenizer-type NullTokenizer --vocab-size 128255 --mock-data --lr 1e-4 --train-iters 10 \
    --micro-batch-size 1 --global-batch-size 32 --bf16
