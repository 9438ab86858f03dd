#!/bin/bash
#SBATCH -J gpt-in-a-heredoc
#SBATCH -N 2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8

TP=4
GBS=96

MODEL_WORDS="--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048"

read -r -d '' WHAT_RUNS <<EOF
export OMP_NUM_THREADS=8;
torchrun --nnodes=\$SLURM_NNODES --nproc_per_node=8
  --rdzv_backend=c10d --rdzv_endpoint=first:29500
  pretrain_gpt.py ${MODEL_WORDS} --max-position-embeddings 2048
  --tensor-model-parallel-size ${TP} --micro-batch-size 3 --global-batch-size ${GBS}
  --bf16 --tokenizer-type NullTokenizer --vocab-size 51199 --mock-data --train-iters 5 --lr 1e-4
EOF
WHAT_RUNS=$(echo $WHAT_RUNS)

srun --container-image=train.sqsh bash -c "${WHAT_RUNS}"
