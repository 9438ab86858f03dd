#!/bin/bash
# usage: megatron-positional.sh DATA TP PP [SEQUENCES]
DATA=$1
TP=$2
PP=${3}
SEQUENCES=${4:-192}
shift 4

cat <<END
training on $DATA with $TP x $PP
END

torchrun --nnodes=6 --nproc_per_node=8 pretrain_gpt.py \
    --tensor-model-parallel-size=$TP --pipeline-model-parallel-size=$PP \
    --num-layers=40 --hidden-size=5120 --num-attention-heads=40 \
    --seq-length=2048 --max-position-embeddings=2048 \
    --micro-batch-size=1 --global-batch-size=$SEQUENCES \
    --bf16 --use-distributed-optimizer --data-path=$DATA \
    --tokenizer-type=NullTokenizer --vocab-size=51199 \
    --lr=1e-4 --train-iters=100
