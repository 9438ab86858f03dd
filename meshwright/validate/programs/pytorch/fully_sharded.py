"""FSDP2 over a stage: one unit a layer, the ends in one root unit or in units of their own."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from meshwright.hwprofiles import Precision, StackProfile, Units
from meshwright.simulator.layout import STACK_FORMATS, Formats, chosen_formats
from meshwright.validate.programs.contract import ProgramRequest
from meshwright.validate.programs.experts import GroupedExperts, TransformersGroupedExperts
from meshwright.validate.programs.layers import VirtualStage
from meshwright.validate.programs.pytorch.layout import RankLayout
from meshwright.validate.programs.pytorch.parts import NORMS, Embedding, Head
from meshwright.validate.programs.pytorch.precision import DTYPES


def mixed_precision(
    precision: Precision, stack: StackProfile, formats: Formats = STACK_FORMATS
) -> MixedPrecisionPolicy:
    """Return the FSDP2 mixed-precision policy of a job on *stack*.

    An fp32 job computes in what its shards are kept in.

    Args:
        precision: Of the job.
        stack: Software stack of the program.
        formats: Of gradients, as a plan asks for.
    """
    reduced = chosen_formats(stack, precision, formats).reduced
    return MixedPrecisionPolicy(
        param_dtype=None if precision is Precision.FP32 else DTYPES[precision],
        reduce_dtype=None if reduced in (None, precision) else DTYPES[reduced],
    )


class ExpertShards(NamedTuple):
    """FSDP2 sharding of a rank's experts, which other ranks hold than its layers.

    Args:
        mesh: Over which ranks.
        num_batches: Parts of a batch over which gradients are averaged.
        cuts_widths: Whether there are more ranks than experts, so that these are cut.
    """

    mesh: DeviceMesh
    num_batches: int
    cuts_widths: bool

    @classmethod
    def of(cls, request: ProgramRequest, layout: RankLayout) -> "ExpertShards | None":
        """Return the sharding of a plan's experts; None where it is that of layers."""
        mesh, plan, experts = layout.expert_data_mesh, request.plan, request.job.transformer.experts
        if mesh is None or experts is None:
            return None
        cuts = request.stack.splits_experts and plan.num_shards > experts.num_experts
        return cls(mesh, plan.dp_cp, cuts)

    def shard(
        self,
        stage: VirtualStage,
        policy: MixedPrecisionPolicy,
        stack: StackProfile,
        *,
        reshards: bool,
    ) -> None:
        """Make the experts of each layer an FSDP unit, before the layer is one.

        `apply_fsdp` of torchtitan/models/llama4/infra/parallelize.py, 0.2.2; in the same way
        `apply_fully_sharded_data_parallelism` of transformers/distributed/fsdp.py, 5.23.
        """
        kept_layer = _kept_layer(stage, stack)
        for layer in stage.layers.values():
            for module in _expert_modules(layer):
                self._shard(module, policy, frees=reshards and layer is not kept_layer)

    def gather_ahead(self, stage: VirtualStage) -> None:
        """Prefetch both units of the next layer as one begins, forward and backward.

        `apply_fsdp` of torchtitan/models/llama4/infra/parallelize.py, 0.2.2.
        """
        layers = [*stage.layers.values()]
        units = [[layer, *_expert_modules(layer)] for layer in layers]
        ends: list[nn.Module] = []
        heads: list[nn.Module] = []
        if isinstance(stage.embedding, Embedding):
            ends = [stage.embedding.words]
        if isinstance(stage.head, Head):
            heads = [stage.head.norm, stage.head.output]
        for index, layer in enumerate(layers):
            behind = units[index + 1] if layer is not layers[-1] else heads
            _fsdp(layer).set_modules_to_forward_prefetch([*map(_fsdp, behind)])
            before = units[index - 1] if index else ends
            _fsdp(layer).set_modules_to_backward_prefetch([*map(_fsdp, before)])
        if not layers:
            return
        for end in ends:
            _fsdp(end).set_modules_to_forward_prefetch([_fsdp(layers[0])])
        for head in heads[1:]:
            _fsdp(head).set_modules_to_backward_prefetch([_fsdp(layers[-1])])

    def _shard(self, module: nn.Module, policy: MixedPrecisionPolicy, *, frees: bool) -> None:
        fully_shard(
            module,
            mesh=self.mesh,
            mp_policy=policy,
            reshard_after_forward=frees,
            shard_placement_fn=(lambda _: Shard(1)) if self.cuts_widths else None,
        )
        unit = _fsdp(module)
        unit.set_gradient_divide_factor(self.num_batches)
        # NCCL alone divides as it adds.  One rank alone, told to sum, would divide twice (2.13).
        unit.set_force_sum_reduction_for_comms(self.mesh["edp"].size() > 1)


def _expert_modules(layer: nn.Module) -> list[nn.Module]:
    """Return the experts of a layer, if it has some."""
    return [
        each
        for each in layer.modules()
        if isinstance(each, GroupedExperts | TransformersGroupedExperts)
    ]


def _fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def _kept_layer(stage: VirtualStage, stack: StackProfile) -> nn.Module | None:
    """Return the layer whose parameters stay from its forward pass to its backward, if any."""
    if not (stack.keeps_last_layer and stage.embedding and stage.head):
        return None
    *_, last = (None, *stage.layers.values())
    return last


def shard_stage(
    stage: VirtualStage,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    stack: StackProfile,
    *,
    reshards: bool,
    offloads: bool = False,
) -> FSDPModule:
    """Shard *stage* in place, each layer a unit, and return it.

    The root unit keeps PyTorch's default: it is not resharded after its forward pass, which its
    backward soon follows. So is a unit of final norm and head, with a table that is tied to it.

    Args:
        stage: Whole, or split over tensor-parallel ranks.
        mesh: Over which; with two dims, shards on the second and replicas on the first.
        policy: Precision of gathered parameters and of reductions.
        stack: Its FSDP units of embedding, final norm and head, and what it reshards.
        reshards: Free a layer's gathered parameters after its forward pass.
        offloads: Keep shards, gradients and states in host memory.
    """
    place = CPUOffloadPolicy(pin_memory=False) if offloads else OffloadPolicy()

    def shard(modules: nn.Module | list[nn.Module], *, frees: bool | None = None) -> None:
        fully_shard(
            modules,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=frees,
            offload_policy=place,
        )

    head: list[nn.Module] = []
    if isinstance(stage.head, Head):
        head = [stage.head.norm, stage.head.output]
    if isinstance(stage.embedding, Embedding) and stack.units is Units.ENDS:
        words = stage.embedding.words
        if any(module.weight is words.weight for module in head):
            head.insert(1, words)  # gathered when the first of them runs
        else:
            shard(words, frees=reshards)
    kept_layer = _kept_layer(stage, stack)
    for layer in stage.layers.values():
        _put_norms_last(layer)
        shard(layer, frees=reshards and layer is not kept_layer)
    if head and stack.units is Units.ENDS:
        shard(head, frees=False)
    # Last: it takes the parameters that no inner unit has.
    shard(stage)
    return _fsdp(stage)


def _put_norms_last(layer: nn.Module) -> None:
    """Make the last weight of a unit a norm's, as in layers of transformers and torchtitan.

    The reduction has a name for the gradient of the last one until it returns.
    """
    for name in NORMS:
        norm = getattr(layer, name)
        delattr(layer, name)
        setattr(layer, name, norm)


@contextmanager
def views_returned() -> Iterator[None]:
    """Let units return views, such as a DTensor's local part: no program writes to them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
        yield
