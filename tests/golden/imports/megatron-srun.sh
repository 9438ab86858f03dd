#!/bin/bash
#SBATCH --job-name=dense-llama
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
#SBATCH --exclusive

export CUDA_DEVICE_MAX_CONNECTIONS=1
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=6000

ARGS="--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64
  --group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096
  --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear
  --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0
  --tokenizer-type NullTokenizer --vocab-size 31999 --make-vocab-size-divisible-by 1 --mock-data
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --sequence-parallel
  --micro-batch-size 1 --global-batch-size 64 --bf16 --use-distributed-optimizer
  --distributed-timeout-minutes 30 --train-iters 100 --lr 1.5e-4"

srun --kill-on-bad-exit=1 --label python -u pretrain_gpt.py ${ARGS}
