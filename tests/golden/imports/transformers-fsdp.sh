#!/bin/bash
torchrun --nproc_per_node=8 run_clm.py \
  --model_name_or_path meta-llama/Meta-Llama-3-8B \
  --train_file own.txt --block_size 2048 --do_train \
  --bf16 --gradient-accumulation-steps 4 --per-device-train-batch-size 1 \
  --fsdp "shard_grad_op auto_wrap" \
  --fsdp_config '{"activation_checkpointing": true}' \
  --optim adamw_torch --output_dir out
