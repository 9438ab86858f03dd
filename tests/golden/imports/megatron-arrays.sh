#!/usr/bin/env bash
set -euo pipefail

nodes=5
devices=8
run_name=small-gpt   # only a label

rendezvous=(
    --nnodes "$nodes"
    --nproc-per-node "$devices"
    --rdzv-backend c10d
    --rdzv-endpoint "$(hostname):29400"
)

model=(
    --num-layers 20          # divides by five stages
    --hidden-size 2048
    --num-attention-heads 16
    --seq-length 1024
    --max-position-embeddings 1024
    # tokens are numbers drawn at random
    --tokenizer-type NullTokenizer
    --vocab-size 50256
    --mock-data
)

layout=(
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 5
    --num-layers-per-virtual-pipeline-stage 2
)

training=(
    --micro-batch-size 2
    --global-batch-size 160
    --train-samples 1_000_000
    --lr 2e-4
    --fp16
)
training[5]=400000

outputs=(--save "runs/${run_name}" --save-interval 500 --log-interval 10)

torchrun "${rendezvous[@]}" pretrain_gpt.py \
    "${model[@]}" "${layout[@]}" \
    ${training[@]} ${outputs[@]}
