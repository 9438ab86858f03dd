#! /bin/bash
WORLD="--nproc_per_node 8 --nnodes 2 --node_rank 0 --master_addr localhost --master_port 6000"
python -m torch.distributed.launch $WORLD \
       pretrain_gpt.py \
       --tensor-model-parallel-size 1 \
       --num-layers 24 \
       --hidden-size 1024 \
       --num-attention-heads 16 \
       --micro-batch-size 8 \
       --micro-batch-size 4 \
       --seq-length 2048 \
       --max-position-embeddings 2048 \
       --train-iters 500000 \
       --lr 0.00015 \
       --tokenizer-type NullTokenizer --vocab-size 51199 --mock-data \
       --fp16
