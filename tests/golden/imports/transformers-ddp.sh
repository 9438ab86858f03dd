#!/bin/bash
torchrun --nnodes 2 --nproc-per-node 4 run_clm.py \
  --model_name_or_path openai-community/gpt2-xl \
  --dtype float32 \
  --dataset_name own/texts \
  --block_size 1024 \
  --do_train \
  --bf16 \
  --per_device_train_batch_size 2 \
  --gradient_accumulation_steps=8 \
  --learning_rate 5e-5 \
  --save_strategy no \
  --output_dir out
