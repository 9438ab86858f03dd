"""One rank of a cluster whose other ranks are absent: its own work is real."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket, distributed_c10d  # type: ignore[attr-defined] # documented, not declared
from torch.nn.parallel import DistributedDataParallel

from meshwright.validate.counting.finished_work import done, finished_work, outputs_filled
from meshwright.validate.counting.internals import fake_process_group
from meshwright.validate.counting.pipelines import pipeline_patches


@contextmanager
def fake_ranks(rank: int, world_size: int) -> Iterator[None]:
    """Run the code inside as *rank* of *world_size*, on real tensors and without the others.

    Collectives leave their buffers as they are, or fill them with what this rank has; messages
    that are received are random. The code may be that of `fake_cluster`.

    Args:
        rank: Rank, from 0.
        world_size: Number of ranks.
    """
    construct = DistributedDataParallel.__init__
    changes = list(pipeline_patches())
    changes.append(patch.object(DistributedDataParallel, "__init__", _unreduced(construct)))
    # Programs call either name; torch.distributed exports copies.
    for module in (dist, distributed_c10d):
        changes.append(patch.object(module, "isend", _sent))
        changes.append(patch.object(module, "irecv", _received))
    with fake_process_group(rank, world_size), outputs_filled(), ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        yield


def _sent(tensor: Tensor, *_args: object, **_kwargs: object) -> dist.Work:
    return finished_work([tensor])


def _received(tensor: Tensor, *_args: object, **_kwargs: object) -> dist.Work:
    with torch.no_grad():
        tensor.normal_()
    return finished_work([tensor])


def _unreduced(construct: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor of DistributedDataParallel that leaves its buckets as they are.

    Its reducer cannot read what the fake group returns. It takes one hook: those of the program,
    which would reduce in another format, are left out.
    """

    def wrapper(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        construct(self, *args, **kwargs)
        self.register_comm_hook(None, _kept)
        setattr(self, "register_comm_hook", _ignored)  # noqa: B010 - of this object alone

    return wrapper


def _ignored(*_args: object) -> None:
    """Stand for a registration of one more hook."""


def _kept(_state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    return done(buffer, [buffer])
