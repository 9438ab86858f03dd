#!/bin/bash
# DeepSpeed's launcher, Megatron-LM's trainer.
deepspeed --num_nodes 2 --num_gpus 8 pretrain_gpt.py \
    --num-layers 32 --hidden-size 2560 --num-attention-heads 32 \
    --seq-length 2048 --max-position-embeddings 2048 \
    --tensor-model-parallel-size 2 --micro-batch-size 4 --global-batch-size 256 \
    --fp16 --tokenizer-type NullTokenizer --vocab-size 51199 --mock-data --lr 1e-4 --train-iters 100
