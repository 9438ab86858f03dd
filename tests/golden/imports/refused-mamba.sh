#!/bin/bash
PATTERN="M-M-M*-M-M-M*-"
torchrun --nproc_per_node 8 pretrain_mamba.py --hybrid-layer-pattern $PATTERN \
    --hidden-size 1024 --num-attention-heads 16 --seq-length 4096 --max-position-embeddings 4096 \
    --micro-batch-size 4 --global-batch-size 32 --bf16 --position-embedding-type none \
    --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec
