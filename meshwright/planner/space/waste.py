"""Numbers of devices and sequences that leave devices idle, and the nearest better ones."""

from collections.abc import Iterator
from math import gcd, isqrt

from meshwright.hwprofiles import Cluster
from meshwright.simulator import TrainingJob

# How far a better number may be, and how many times as many replicas it must allow.
NEAR_FRACTION = 1 / 8
WORTH = 2


def waste_hints(job: TrainingJob, cluster: Cluster, num_gpus: int) -> Iterator[str]:
    """Yield a line for a number that keeps devices idle, with the nearest that do not.

    Devices of a node that is not filled are idle, whatever the layout.  Replicas divide the devices
    and the batch: at most their greatest common divisor can be, and the rest of the devices must
    split the model.
    """
    node, batch = cluster.devices_per_node, job.global_batch_size
    if num_gpus > node and num_gpus % node:
        below = num_gpus // node * node
        idle = below + node - num_gpus
        yield (
            f"{num_gpus:,} GPUs leave {idle} of the last node's {node} idle; "
            f"nearest: {below:,} or {below + node:,}"
        )
    better = better_batches(batch, num_gpus)
    if better:
        texts = (f"{number:,} (dp up to {gcd(number, num_gpus):,})" for number in better)
        yield (
            f"a global batch of {batch:,} on {num_gpus:,} GPUs allows dp up to "
            f"{gcd(batch, num_gpus):,}; nearest: {' or '.join(texts)}"
        )


def better_batches(batch: int, num_gpus: int) -> tuple[int, ...]:
    """Return the batches near *batch*, one below and one above, that most replicas can share.

    Nothing where none allows twice as many.

    >>> better_batches(100, 64), better_batches(1000, 3072), better_batches(1536, 3072)
    ((96, 112), (960, 1024), ())
    """
    worth = WORTH * gcd(batch, num_gpus)
    most = int(batch * NEAR_FRACTION)
    small = [each for each in range(1, isqrt(num_gpus) + 1) if num_gpus % each == 0]
    divisors = sorted({*small, *(num_gpus // each for each in small)}, reverse=True)
    found: list[int] = []
    for above in (0, 1):
        nearest = ((batch // each + above) * each for each in divisors if each >= worth)
        found += [each for each in nearest if each and abs(each - batch) <= most][:1]
    return tuple(found)
