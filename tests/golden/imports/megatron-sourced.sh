#!/bin/bash
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$HERE/megatron-sourced-sizes.sh"
HEADS=${HEADS:-1}

python -m torch.distributed.run --nproc_per_node=4 --nnodes=1 pretrain_gpt.py \
    --num-layers $LAYERS --hidden-size $WIDTH --num-attention-heads $HEADS $common_words \
    --pipeline-model-parallel-size 2 --micro-batch-size 8 --global-batch-size 64 \
    --tokenizer-type NullTokenizer --vocab-size 50256 --make-vocab-size-divisible-by 1 --mock-data \
    --no-save-optim --lr 1e-4 --train-iters 10
