#!/bin/bash
# torchtitan 0.3: a configuration by name, and options.
titan() {
    torchrun --nnodes=1 --nproc-per-node="$DEVICES" -m torchtitan.train "$@"
}
DEVICES=8
titan --module llama3 --config llama3_8b \
    --training.seq_len 4096 --training.local_batch_size 2 --training.global_batch_size 32 \
    --training.disable-cuda-graphs --parallelism.tensor_parallel_degree 2 \
    --parallelism.data_parallel_shard_degree 4 \
    --compile.enable --compile.components model activation-checkpoint:full
