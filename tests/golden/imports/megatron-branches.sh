#!/bin/bash
MP_SIZE=${MP_SIZE:-8}
PRECISION=fp8
RECOMPUTE=full
OFFICIAL=yes

EXTRA=""
if [ $MP_SIZE -gt 1 ]; then
    EXTRA="$EXTRA --sequence-parallel"
fi

if [[ $PRECISION == fp16 ]]; then
    EXTRA="$EXTRA --fp16"
elif [[ "$PRECISION" == fp8 && -n "$OFFICIAL" ]]; then
    EXTRA="$EXTRA --bf16 --fp8-format hybrid --fp8-param-gather"
else
    EXTRA="$EXTRA --bf16"
fi

if [ "$RECOMPUTE" = "full" ]; then
    EXTRA="$EXTRA --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
fi

[ -z "$WITH_ZERO" ] || EXTRA="$EXTRA --use-distributed-optimizer"

torchrun --nnodes 4 --nproc_per_node 8 pretrain_gpt.py \
    --tensor-model-parallel-size ${MP_SIZE} \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm \
    --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights \
    --hidden-dropout 0.0 --attention-dropout 0.0 --seq-length 4096 --max-position-embeddings 8192 \
    --tokenizer-type NullTokenizer --vocab-size 128255 --mock-data --lr 1e-4 --train-iters 10 \
    --micro-batch-size 2 --global-batch-size 128 ${EXTRA}
