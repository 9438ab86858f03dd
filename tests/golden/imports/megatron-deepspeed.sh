#!/bin/bash
# Options that Megatron-DeepSpeed alone has.
deepspeed --num_gpus 8 pretrain_gpt.py \
    --num-layers 24 --hidden-size 2048 --num-attention-heads 16 \
    --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 4 --global-batch-size 256 \
    --fp16 --data-impl mmap --zero-stage 2 --no-pipeline-parallel --deepspeed \
    --deepspeed_config deepspeed-stage-3.json --checkpoint-activations
