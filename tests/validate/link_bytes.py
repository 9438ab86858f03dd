"""Closed forms of what crosses links of strategies without a mesh."""

from fractions import Fraction


def module_link_bytes(size_bytes: int, num_devices: int, num_passes: int = 1) -> int:
    """Return what crosses the link of device 0 of one process: a copy out, a gradient in.

    Args:
        size_bytes: Parameters, and gradients, as they are copied.
        num_devices: Replicas; device 0 is one.
        num_passes: Microbatches; each broadcasts and reduces again.

    >>> module_link_bytes(100, 8)
    1400
    """
    return 2 * (num_devices - 1) * size_bytes * num_passes


def server_link_bytes(size_bytes: int, num_workers: int) -> int:
    """Return what crosses the link of one server of its own in a step: pulls and pushes.

    >>> server_link_bytes(100, 8)
    1600
    """
    return 2 * num_workers * size_bytes


def sharded_worker_bytes(size_bytes: int, num_workers: int) -> Fraction:
    """Return what a worker sends in a step if all workers are servers: as in a ring all-reduce.

    As a worker it pushes, and as a server it hands out, its part to each of the others.

    >>> sharded_worker_bytes(800, 8)
    Fraction(1400, 1)
    """
    return Fraction(2 * (num_workers - 1), num_workers) * size_bytes
