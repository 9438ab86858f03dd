#!/bin/bash
# SIZE is one of tiny, medium and large.
case "$SIZE" in
    tiny)
        LAYERS=12; WIDTH=768; HEADS=12; TP=1; PP=1 ;;
    medium | middle)
        LAYERS=32; WIDTH=2560; HEADS=32; TP=2; PP=4 ;;
    l*)
        LAYERS=40; WIDTH=5120; HEADS=40; TP=8; PP=1 ;;
    *)
        echo "no such size: $SIZE" >&2
        exit 1 ;;
esac

torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py \
    --num-layers $LAYERS --hidden-size $WIDTH --num-attention-heads $HEADS \
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP \
    --seq-length 2048 --max-position-embeddings 2048 \
    --tokenizer-type NullTokenizer --vocab-size 51199 --mock-data \
    --micro-batch-size 4 --global-batch-size 64 --fp16 --lr 1.6e-4 --train-iters 300
