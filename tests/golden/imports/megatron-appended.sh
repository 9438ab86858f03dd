#!/bin/bash
USE_LONG_SEQUENCES=1
WORDS=(--num-layers 32 --hidden-size 4096 --num-attention-heads 32)
WORDS+=(--ffn-hidden-size 11008 --swiglu --normalization RMSNorm --position-embedding-type rope)
WORDS+=(--disable-bias-linear --untie-embeddings-and-output-weights)
WORDS+=(--hidden-dropout 0 --attention-dropout 0)
WORDS+=(--tokenizer-type NullTokenizer --vocab-size 31999 --make-vocab-size-divisible-by 1)

TEXT="--bf16"
TEXT+=" --micro-batch-size 1"
TEXT+=" --global-batch-size 32"

if (( USE_LONG_SEQUENCES )); then
    WORDS+=(--seq-length 16384 --max-position-embeddings 16384)
    TEXT+=" --context-parallel-size 2 --cp-comm-type p2p"
else
    WORDS+=(--seq-length 4096 --max-position-embeddings 4096)
fi
# Three layers of each stage are computed again.
TEXT+=" --recompute-granularity full --recompute-method block --recompute-num-layers 3"

exec torchrun --standalone --nproc_per_node=8 pretrain_gpt.py "${WORDS[@]}" $TEXT \
    --tensor_model_parallel_size 2 --use_distributed_optimizer --mock_data --lr 1e-4 --train_iters 10
