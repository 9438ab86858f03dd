#!/bin/bash
NODES=${NODES:-4}
OVERRIDES="model.tensor_model_parallel_size=8 model.pipeline_model_parallel_size=2"
OVERRIDES="$OVERRIDES model.sequence_parallel=true train.global_batch_size=256"
OVERRIDES="$OVERRIDES train.micro_batch_size=1 train.train_iters=200 optimizer.lr=0.0003"
torchrun --nnodes=$NODES --nproc_per_node=8 scripts/training/run_recipe.py \
    --recipe llama3_8b_pretrain_config --mode pretrain --dataset mock $OVERRIDES
