"""FSDP2 over a stage: one unit a layer, the rest of the stage in the root unit."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from meshwright.hwprofiles import Precision, StackProfile
from meshwright.simulator.layout import STACKS_OWN, Formats, chosen_formats
from meshwright.validate.programs.layers import VirtualStage
from meshwright.validate.programs.pytorch.precision import DTYPES


def mixed_precision(
    precision: Precision, stack: StackProfile, formats: Formats = STACKS_OWN
) -> MixedPrecisionPolicy:
    """Return how the fp32 shards of *stack* compute and are reduced.

    An fp32 job computes in what its shards are kept in.

    Args:
        precision: Of the job.
        stack: Whose program.
        formats: Of gradients, as a plan asks for.
    """
    reduced = chosen_formats(stack, precision, formats).reduced
    return MixedPrecisionPolicy(
        param_dtype=None if precision is Precision.FP32 else DTYPES[precision],
        reduce_dtype=None if reduced in (None, precision) else DTYPES[reduced],
    )


def shard_stage(
    stage: VirtualStage,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    *,
    reshards: bool,
    offloads: bool = False,
) -> FSDPModule:
    """Shard *stage* in place, each layer a unit, and return it.

    The root unit (embedding, final norm and head) keeps PyTorch's default: it is not resharded
    after its forward pass, which its backward soon follows.

    Args:
        stage: Whole, or split over tensor-parallel ranks.
        mesh: Over which; with two dims, shards on the second and replicas on the first.
        policy: Precision of gathered parameters and of reductions.
        reshards: Free a layer's gathered parameters after its forward pass.
        offloads: Keep shards, gradients and states in host memory.
    """
    place = CPUOffloadPolicy(pin_memory=False) if offloads else OffloadPolicy()
    for layer in stage.layers.values():
        fully_shard(
            layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards, offload_policy=place
        )
    return fully_shard(stage, mesh=mesh, mp_policy=policy, offload_policy=place)


@contextmanager
def views_returned() -> Iterator[None]:
    """Let units return views, such as a DTensor's local part: no program writes to them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
        yield
