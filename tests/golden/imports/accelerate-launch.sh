#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
head_node=$(hostname)
accelerate launch --config_file accelerate-sharded-2.yaml \
    --num_machines 2 --num_processes 16 --machine_rank 0 \
    --main_process_ip "$head_node" --main_process_port 29500 \
    finetune.py --learning_rate 1e-5
