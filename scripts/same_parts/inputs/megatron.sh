torchrun --nproc-per-node 8 pretrain_gpt.py \
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 1 \
  --global-batch-size 16 --bf16 --seq-length 1024 \
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
  --num-layers 12 --hidden-size 768 --num-attention-heads 12 --overlap-grad-reduce
