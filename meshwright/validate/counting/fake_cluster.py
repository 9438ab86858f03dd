"""One process as one rank of a cluster of any size: nothing is computed, nothing is sent."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from meshwright.validate.counting.gpu_kernels import gpu_kernels
from meshwright.validate.counting.internals import (
    fake_process_group,
    fake_tensors,
    library_on_fakes,
)


@contextmanager
def fake_cluster(rank: int, world_size: int) -> Iterator[None]:
    """Run the code inside as *rank* of *world_size*, on tensors that have sizes but no data.

    A program that runs under gloo runs here unchanged: device meshes, DTensor, FSDP2,
    DistributedDataParallel and pipeline schedules are made and used inside. It must not look at
    values (``loss.item()``), and pipeline stages need their ``input_args`` and ``output_args``.
    On the way out, also by an exception, all is as it was before.

    Args:
        rank: Rank, from 0.
        world_size: Number of ranks.

    Raises:
        ValueError: If there is no such rank.
        RuntimeError: If this process has a process group already.

    >>> import torch
    >>> with fake_cluster(1024, 3072):
    ...     print(dist.get_rank(), dist.get_world_size(), torch.ones(2**40).nbytes == 2**42)
    1024 3072 True
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} of world_size={world_size}; ranks count from 0")
    if dist.is_initialized():
        raise RuntimeError("this process is in a process group; leave it before a fake cluster")
    with (
        fake_process_group(rank, world_size),
        library_on_fakes(),
        gpu_kernels(),
        fake_tensors(),
    ):
        yield
