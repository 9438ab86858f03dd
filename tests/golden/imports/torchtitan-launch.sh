#!/usr/bin/bash
set -ex
NGPU=${NGPU:-"8"}
export LOG_RANK=${LOG_RANK:-0}
CONFIG_FILE=${CONFIG_FILE:-"torchtitan-tensor.toml"}
overrides=""
if [ $# -ne 0 ]; then
    overrides="$*"
fi

PYTORCH_ALLOC_CONF="expandable_segments:True" \
torchrun --nproc_per_node=${NGPU} --nnodes 2 --rdzv_backend c10d --rdzv_endpoint="localhost:0" \
    --local-ranks-filter ${LOG_RANK} --role rank --tee 3 \
    -m torchtitan.train --job.config_file ${CONFIG_FILE} \
    --parallelism.tensor_parallel_degree 8 --training.local_batch_size=4 $overrides
