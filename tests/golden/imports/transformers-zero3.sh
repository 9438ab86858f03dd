#!/bin/bash
MODEL=meta-llama/Llama-2-7b-hf
BATCH=2

deepspeed --num_gpus 8 run_clm.py \
  --deepspeed deepspeed/zero3-auto.json \
  --model_name_or_path $MODEL \
  --train_file own.txt --block_size 4096 --do_train \
  --per_device_train_batch_size ${BATCH:-1} --gradient_accumulation_steps 2 \
  --gradient_checkpointing True \
  --bf16 True --tf32 True \
  --output_dir out
