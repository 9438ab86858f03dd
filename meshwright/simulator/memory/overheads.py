"""Device memory beside live tensors: library workspaces, allocator, context, communicators."""

from math import prod
from typing import Generic, NamedTuple, Self

from meshwright.hwprofiles import Allocator, Cluster, Device, Number, StackProfile, format_bytes
from meshwright.simulator.errors import PlanError
from meshwright.simulator.layout import (
    REPLICATED,
    Axis,
    ContextAxis,
    ExpertAxis,
    Mesh,
    ResolvedPlan,
    TrainingJob,
    tied_embedding_rank,
)
from meshwright.simulator.memory.block_bytes import Size
from meshwright.simulator.model import AnyModel, ModelSpec, shares_embedding

# What symmetric memory follows from.
SYMMETRIC = "tp", "cp", "microbatch_size"
NUM_PRODUCT_THREADS = 2
"""Host threads that multiply matrices: the program's own in forward, autograd's in backward."""

NUM_GROUPED_STREAMS = 4
"""On which Transformer Engine starts products of a group (common/util/multi_stream.cpp)."""


PARTS = 10_000
"""Of a byte: reserved memory is counted in them, so that columns and single plans agree exactly."""


class Fragmentation(NamedTuple):
    """Bytes that an allocator reserves beyond allocated ones, in ten-thousandths.

    Args:
        passing_parts: Of what a step allocates and frees: activations, buffers, workspaces.
        state_parts: Of states, which live from step to step.
        keeps_gradients: Whether gradients are such states, in buffers that are allocated once.
    """

    passing_parts: int
    state_parts: int
    keeps_gradients: bool = True

    @classmethod
    def of(cls, stack: StackProfile) -> Self:
        """Return the fragmentation of a stack's allocator.

        Expandable segments unmap what is free before an allocation fails (unmap_block of
        c10/cuda/CUDACachingAllocator.cpp): at the limit nothing is held beyond.
        """
        keeps = stack.gradient_as_bucket_view and not stack.is_fully_sharded
        if stack.allocator == Allocator.EXPANDABLE:
            return cls(0, 0, keeps)
        # A stack without a fraction of its own for states has one for all.
        passing, state = stack.allocator_fraction, stack.allocator_state_fraction
        of_states = passing if state is None else state
        return cls(round(passing * PARTS), round(of_states * PARTS), keeps)

    def state_bytes(self, weights_bytes: Size, gradients_bytes: Size) -> Size:
        """Return the bytes that live from step to step, of weights with states, and gradients."""
        return weights_bytes + gradients_bytes if self.keeps_gradients else weights_bytes

    def reserved_parts(self, live_bytes: Size, state_bytes: Size) -> Size:
        """Return the bytes reserved for *live_bytes*, states among them, in `PARTS`.

        >>> Fragmentation(1000, 400).reserved_parts(1000, 600) / PARTS
        1064.0
        """
        passing, state = self.passing_parts, self.state_parts
        # All bytes at the rate of passing ones, less the difference for states.
        return live_bytes * (PARTS + passing) - state_bytes * (passing - state)

    def least_reserved_parts(self, live_bytes: Size) -> Size:
        """Return a lower bound of the bytes reserved for *live_bytes*, whatever are states."""
        return live_bytes * (PARTS + min(self.passing_parts, self.state_parts))


class PeakBytes(NamedTuple, Generic[Size]):
    """Largest live bytes of a rank, and largest `Fragmentation.reserved_parts` of one."""

    live_bytes: Size
    reserved_parts: Size


class Overheads(NamedTuple):
    """Bytes of a rank beside its live tensors.

    Args:
        workspace_bytes: Workspaces of GEMM libraries, which the allocator reserves, too.
        fragmentation: Share that the allocator reserves beyond allocated bytes.
        outside_bytes: Bytes outside of the allocator: CUDA context and NCCL communicators.
    """

    workspace_bytes: int
    fragmentation: Fragmentation
    outside_bytes: int

    @classmethod
    def of(
        cls, device: Device, stack: StackProfile, model: AnyModel, num_communicators: int = 0
    ) -> Self:
        """Return the overheads of a rank in so many communicators."""
        each = device.overheads.communicator_bytes if device.overheads else 0
        outside = stack.context_bytes + num_communicators * each
        return cls(workspace_bytes(device, stack, model), Fragmentation.of(stack), outside)

    @classmethod
    def of_plan(
        cls, job: TrainingJob, plan: ResolvedPlan, cluster: Cluster, stack: StackProfile
    ) -> Self:
        """Return the overheads of a rank of *plan*."""
        # Tied ends of a pipeline have a communicator for the embedding's gradient.
        is_tied = shares_embedding(job.model) and tied_embedding_rank(plan) > 0
        count = num_communicators(Mesh.of(plan), is_tied=is_tied)
        found = cls.of(cluster.device, stack, job.model, count)
        symmetric = int(symmetric_bytes(job, stack, *map(plan.number, SYMMETRIC)))
        return found._replace(outside_bytes=found.outside_bytes + symmetric)

    @property
    def workspace_parts(self) -> int:
        """Bytes reserved for the workspaces, in `PARTS`."""
        return self.fragmentation.reserved_parts(self.workspace_bytes, 0)

    def reserved_bytes(self, parts: int) -> int:
        """Return the bytes that the allocator reserves for `Fragmentation.reserved_parts`.

        >>> Overheads(20, Fragmentation(500, 500), 500).reserved_bytes(1050 * PARTS)
        1071
        """
        return (parts + self.workspace_parts) // PARTS

    def device_bytes(self, parts: int) -> int:
        """Return the bytes that the device shows as used.

        >>> Overheads(20, Fragmentation(500, 500), 500).device_bytes(1050 * PARTS)
        1571
        """
        return self.reserved_bytes(parts) + self.outside_bytes


def symmetric_bytes(
    job: TrainingJob, stack: StackProfile, tp: Number, cp: Number, microbatch_size: Number
) -> Number:
    """Return the symmetric memory of PyTorch's asynchronous tensor parallelism.

    Two pieces of a product whose sum is scattered; a gather puts one there
    (`_pipelined_produce_and_all2all` and `_pipelined_multi_all_gather_and_consume` of PyTorch 2.13,
    torch/distributed/_symmetric_memory).  It is outside of the allocator.

    Args:
        job: Model, sequence length and precision.
        stack: Software stack.
        tp: Tensor-parallel degree, or a column of them over layouts, as the others.
        cp: Context-parallel degree.
        microbatch_size: Sequences of a pass.
    """
    if not stack.tp_in_pieces or stack.megatron_layers or not isinstance(job.model, ModelSpec):
        return 0 * tp
    # Chunks of a rank's own tokens, which sequence parallelism leaves on it.
    piece = microbatch_size * job.seq_len // cp // tp * job.model.hidden_size
    return 2 * piece * job.precision.num_bytes * (tp > 1)


def workspace_bytes(device: Device, stack: StackProfile, model: AnyModel) -> int:
    """Return the workspaces of GEMM libraries on *device*.

    A buffer for each host thread that multiplies (getCUDABlasWorkspace of PyTorch's
    CublasHandlePool.cpp), with Transformer Engine one more, and where it groups the products of
    experts one for each stream on which it starts them (get_cublas_workspace of its
    pytorch/cpp_extensions/gemm.py).
    """
    overheads = device.overheads
    if overheads is None:
        return 0
    is_grouped = model.experts is not None and stack.grouped_experts
    num_streams = NUM_GROUPED_STREAMS if is_grouped else 0
    engine = overheads.engine_workspace_bytes if stack.transformer_engine else 0
    return NUM_PRODUCT_THREADS * overheads.product_workspace_bytes + engine * (1 + num_streams)


def num_communicators(mesh: Mesh, *, is_tied: bool) -> int:
    """Return the number of communicators of a rank: each has its own buffers (NVIDIA/nccl #864).

    One for each axis of degree above 1, replicas' over context- and data-parallel ranks; where
    there are several, one over all ranks (for the gradient norm and the loss); and one between both
    ends of a pipeline with a tied embedding. With expert parallelism each expert axis has one more,
    and all ranks that have all experts between them another. Hybrid context parallelism has one for
    either group in place of one over all context-parallel ranks.

    >>> num_communicators(Mesh(tp=8, node_size=8), is_tied=True)
    1
    >>> num_communicators(Mesh(tp=8, dp=4, pp=12, node_size=8), is_tied=True)
    5
    >>> num_communicators(Mesh(dp=16, experts=(1, 8), node_size=8), is_tied=False)
    4
    """
    replicas = prod(map(mesh.degree, REPLICATED))
    others = (mesh.degree(axis) for axis in Axis if axis is not Axis.DP)
    num_split = sum(degree > 1 for degree in (*others, replicas))
    # With one axis its communicator has all ranks already.
    has_world, has_ends = num_split > 1, is_tied and mesh.degree(Axis.PP) > 1
    divides_experts = mesh.degree(ExpertAxis.EP) > 1
    num_experts = divides_experts * sum(mesh.degree(axis) > 1 for axis in ExpertAxis)
    # Hybrid context parallelism has a group for all-to-alls and one for the ring.
    is_nested = all(mesh.degree(axis) > 1 for axis in ContextAxis)
    return num_split + int(has_world) + int(has_ends) + num_experts + int(is_nested)


def usable_bytes(cluster: Cluster, limit_bytes: int | None) -> int:
    """Return the memory limit of a device: a user's, or all that processes can have.

    Raises:
        PlanError: If the limit is more than a device has.
    """
    capacity_bytes = cluster.device.memory_capacity_bytes
    if limit_bytes is None:
        return cluster.device.usable_bytes
    if limit_bytes > capacity_bytes:
        have = format_bytes(capacity_bytes)
        raise PlanError(
            f"memory_limit={format_bytes(limit_bytes)} is more than {cluster.device.name} has; "
            f"allowed: at most {have}"
        )
    return limit_bytes
