"""FLOPs, communication and live bytes of one rank of a PyTorch program, counted exactly."""

from meshwright.validate.counting.absent_ranks import fake_ranks
from meshwright.validate.counting.accelerator import IdleEvent, IdleStream, dummy_accelerator
from meshwright.validate.counting.fake_cluster import fake_cluster
from meshwright.validate.counting.gpu_kernels import gpu_kernels
from meshwright.validate.counting.internals import (
    clear_sharding_cache,
    communication_of,
    current_fake_mode,
    fake_store,
    fake_tensors,
    is_wrapper,
    library_on_fakes,
    storage_identity,
    tensors_in,
)
from meshwright.validate.counting.oracle import RankOracle, measurement_of
from meshwright.validate.counting.pipelines import pipeline_patches
from meshwright.validate.counting.storages import Memories, StorageGroup

__all__ = [
    "IdleEvent",
    "IdleStream",
    "Memories",
    "RankOracle",
    "StorageGroup",
    "clear_sharding_cache",
    "communication_of",
    "current_fake_mode",
    "dummy_accelerator",
    "fake_cluster",
    "fake_ranks",
    "fake_store",
    "fake_tensors",
    "gpu_kernels",
    "is_wrapper",
    "library_on_fakes",
    "measurement_of",
    "pipeline_patches",
    "storage_identity",
    "tensors_in",
]
