# Sizes of one model, for scripts beside this one.
export LAYERS=36
export WIDTH=1280
HEADS=20
common_words="--seq-length 1024 --max-position-embeddings 1024 --bf16"
