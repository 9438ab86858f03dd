"""Numbers of devices and sequences that leave devices idle, or do not divide at all."""

from collections.abc import Iterator
from itertools import product
from math import gcd, isqrt, prod

from meshwright.hwprofiles import Cluster, StackProfile
from meshwright.planner.space.limits import SpaceLimits, is_searched
from meshwright.planner.space.switches import divisors
from meshwright.simulator import TrainingJob
from meshwright.simulator.layout import AXES, Axis

# Distance of a better number as a share, and factor by which it must allow more replicas.
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
    least_replicas = WORTH * gcd(batch, num_gpus)
    most = int(batch * NEAR_FRACTION)
    small = [each for each in range(1, isqrt(num_gpus) + 1) if num_gpus % each == 0]
    divisors = sorted({*small, *(num_gpus // each for each in small)}, reverse=True)
    batches: list[int] = []
    for above in (0, 1):
        nearest = ((batch // each + above) * each for each in divisors if each >= least_replicas)
        batches += [each for each in nearest if each and abs(each - batch) <= most][:1]
    return tuple(batches)


def undivided_splits(
    job: TrainingJob, stack: StackProfile, num_gpus: int, limits: SpaceLimits
) -> tuple[dict[str, int], int]:
    """Return the number of splits that do not divide the job, by reason, and of all splits.

    >>> from meshwright.hwprofiles import load_stack
    >>> job, limits = TrainingJob(model="llama3-8b", global_batch_size=5), SpaceLimits(tp=(1,))
    >>> undivided_splits(job, load_stack("ddp"), 2, limits)
    ({'global_batch_size=5 is not divisible by dp=2; nearest: 4 or 6': 1}, 2)
    """
    reasons: dict[str, int] = {}
    splits = list(_splits(job, stack, num_gpus, limits))
    for degrees in splits:
        refusals = (_split_refusal(job, axis, degree) for axis, degree in degrees.items())
        first = next(filter(None, refusals), None)
        if first is not None:
            reasons[first] = reasons.get(first, 0) + 1
    return reasons, len(splits)


def _splits(
    job: TrainingJob, stack: StackProfile, num_gpus: int, limits: SpaceLimits
) -> Iterator[dict[Axis, int]]:
    """Yield the degrees of all axes that *limits* allow and whose product is *num_gpus*."""
    free = [axis for axis, degrees_by_axis in AXES.items() if not degrees_by_axis.takes_rest]
    (rest,) = (axis for axis, degrees_by_axis in AXES.items() if degrees_by_axis.takes_rest)
    degrees_by_axis = {
        axis: [each for each in divisors(num_gpus) if limits.allows(axis, each)]
        if is_searched(axis, job, stack, limits)
        else [1]
        for axis in free
    }
    for degrees in product(*degrees_by_axis.values()):
        rest_degree, remainder = divmod(num_gpus, prod(degrees))
        if not remainder and limits.allows(rest, rest_degree):
            yield {**dict(zip(free, degrees, strict=True)), rest: rest_degree}


def _split_refusal(job: TrainingJob, axis: Axis, degree: int) -> str | None:
    """Return the reason why a job does not divide by a degree of an axis, or None."""
    known = AXES[axis]
    if known.most is not None and degree > known.most(job):
        return f"{axis}={degree} is more than the {known.most(job)} layers"
    return known.refusal(job, degree)
