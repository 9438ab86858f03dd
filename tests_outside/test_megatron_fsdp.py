"""Which buckets Megatron-FSDP gathers, reduces and keeps, and how often, in models of any sizes.

Weights in 8 bits are Transformer Engine's tensors, which need a GPU: here something with their
attributes stands for them, so that what Megatron-FSDP makes of them is its own code.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from witnesses import megatron_fsdp, megatron_job
from witnesses.boundary import cluster_answered

from meshwright.simulator.model import TRANSFORMER_LAYER
from meshwright.simulator.replication.flat_units import bucket_size
from meshwright.simulator.replication.unit_walk import (
    EndBucket,
    FlatBucket,
    FlatUnit,
    Step,
    UnitWalk,
    WalkSettings,
)
from meshwright.validate.counting import RankOracle

from megatron.core import parallel_state  # isort: skip  (after what stands for Apex)
from megatron.core.distributed.fsdp.src.megatron_fsdp import mixed_precision  # isort: skip
from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import (  # isort: skip
    GradReducePipeline,
)

RANKS, EXPERT_RANKS, WIDTH = 4, 2, 1000
LIMIT = 40_000_000  # elements that fill a bucket of what lies outside all layers
ROWS = 50_000  # of the table and of the head, which fill one each
GRADIENT_BYTES = 4
IS_NARROW = "is_narrow"  # a tensor that stands for one in 8 bits has an attribute of this name


class Way(NamedTuple):
    """What weights in 8 bits are: one copy, of which backward may make a transpose, or two."""

    transposes: bool = False
    has_columns: bool = False

    def weight(self, rows: int) -> nn.Parameter:
        """Return what stands for a weight; it has no elements of its own."""
        weight = nn.Parameter(torch.empty((), dtype=torch.bfloat16).expand(rows, WIDTH))
        facts = {IS_NARROW: True, "get_high_precision_init_val": lambda: torch.empty(rows, WIDTH)}
        data = torch.empty(rows, WIDTH, dtype=torch.uint8)
        if self.has_columns:
            columns = torch.empty_like(data)
            facts |= {"_rowwise_data": data, "_columnwise_data": columns, "is_mx": True}
            facts["update_usage"] = lambda **_: None
        else:
            facts |= {"_data": data, "_transpose": None, "_transpose_invalid": True}
        for name, value in (facts | {"clear_high_precision_init_val": lambda: None}).items():
            setattr(weight, name, value)
        return weight

    def make_transposes(self, weights: Tensor | list[Tensor]) -> None:
        """Do what Transformer Engine does once weights are gathered for backward."""
        for weight in weights if isinstance(weights, list) else [weights]:
            if self.transposes:
                weight._transpose, weight._transpose_invalid = torch.empty_like(weight._data), False


WIDE, OF_HOPPER, OF_BLACKWELL, IN_BLOCKS = None, Way(transposes=True), Way(), Way(has_columns=True)


def class_of(attribute: str) -> type:
    """Return a class of which all is an instance that has an *attribute*."""
    found = {"__instancecheck__": lambda _, tensor: hasattr(tensor, attribute)}
    return type("Standing", (type,), found)("Tensor", (), {})


@contextmanager
def standing(way: Way | None) -> Iterator[None]:
    """Let Megatron-FSDP take what stands for tensors of Transformer Engine for these."""
    if way is None:
        yield
        return
    with patch.multiple(
        mixed_precision,
        create=True,
        HAVE_TE=True,
        FP8_TENSOR_CLASS=class_of(IS_NARROW),
        HAVE_TE_MXFP8TENSOR=True,
        MXFP8Tensor=class_of("is_mx"),
        HAVE_TE_POST_ALL_GATHER_PROCESSING=True,
        post_all_gather_processing=way.make_transposes,
    ):
        yield


class Watch:
    """What lives of buckets at moments of a step, by the block that has them."""

    def __init__(self) -> None:
        self.wrapped: megatron_fsdp.Wrapper | None = None
        self.forward: defaultdict[int, int] = defaultdict(int)
        self.backward: defaultdict[int, int] = defaultdict(int)
        self.gradients: defaultdict[int, int] = defaultdict(int)

    @property
    def levels(self) -> tuple[defaultdict[int, int], ...]:
        """All that is noted, as `Counted` has it."""
        return self.forward, self.backward, self.gradients

    def note(self, levels: dict[int, int], block: int, number: int) -> None:
        """Keep the fullest moment of a *block*."""
        levels[block] = max(levels[block], number)

    def gathered(self) -> int:
        """Return the bytes of gathered weights, and of transposes of these."""
        groups = self.wrapped.param_and_grad_buffer.parameter_groups
        both = {"weight_alloc", "transpose_weight_alloc"}
        pools = [getattr(self.wrapped.param_and_grad_buffer, name) for name in both]
        buckets = sum(held(each.data) for pool in pools for each in pool.buckets.values())
        weights = (weight for group in groups for weight in group.params)
        return buckets + sum(held(getattr(weight, "_transpose", None)) for weight in weights)

    def made(self) -> int:
        """Return the bytes of whole gradients."""
        groups = self.wrapped.param_and_grad_buffer.parameter_groups
        pools = [group.main_grad_buffer.temporary_bucket_allocator for group in groups]
        return sum(held(each.data) for pool in {*pools} for each in pool.buckets.values())


def held(tensor: Tensor | None) -> int:
    """Return the bytes of what a tensor lies in."""
    return 0 if tensor is None else tensor.untyped_storage().nbytes()


class Read(torch.autograd.Function):
    """A module's product, which reads a weight: what lives then is noted."""

    @staticmethod
    def forward(ctx: object, x: Tensor, weight: Tensor, block: int, watch: Watch) -> Tensor:
        """Return something that depends on both."""
        ctx.weight, ctx.noted = weight, (block, watch)
        watch.note(watch.forward, block, watch.gathered())
        return x.clone()

    @staticmethod
    def backward(ctx: object, given: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients of both."""
        block, watch = ctx.noted
        watch.note(watch.backward, block, watch.gathered())
        return given, torch.empty(ctx.weight.shape, dtype=ctx.weight.dtype), None, None


class Product(nn.Module):
    """A module of one weight."""

    def __init__(self, weight: nn.Parameter, block: int, watch: Watch) -> None:
        super().__init__()
        self.weight, self.block, self.watch = weight, block, watch

    def forward(self, x: Tensor) -> Tensor:
        """Read the weight."""
        return Read.apply(x, self.weight, self.block, self.watch)


class Layer(nn.Module):
    """A unit of one weight, of a norm where that is in 8 bits, and of one that is experts'."""

    def __init__(self, rows: tuple[int, int], way: Way | None, block: int, watch: Watch) -> None:
        super().__init__()

        def product(number: int) -> Product:
            weight = nn.Parameter(torch.empty(number, WIDTH)) if way is None else way.weight(number)
            return Product(weight, block, watch)

        self.parts = nn.ModuleList()
        if way is not None:
            norm = nn.Parameter(torch.empty(WIDTH, dtype=torch.bfloat16))
            self.parts.append(Product(norm, block, watch))
        self.parts.append(product(rows[0]))
        if rows[1]:
            self.experts = nn.ModuleList([product(rows[1])])
            self.experts[0].weight.allreduce = False

    def forward(self, x: Tensor) -> Tensor:
        """Read each weight once."""
        for part in (*self.parts, *getattr(self, "experts", ())):
            x = part(x)
        return x


class Model(nn.Module):
    """Table, layers and head, each of them a module of its own."""

    def __init__(self, layers: list[tuple[int, int]], way: Way | None, watch: Watch) -> None:
        super().__init__()
        dtype = torch.float32 if way is None else torch.bfloat16
        table, head = (nn.Parameter(torch.empty(ROWS, WIDTH, dtype=dtype)) for _ in range(2))
        self.table = Product(table, 0, watch)
        self.layers = nn.ModuleList(
            [Layer(rows, way, block, watch) for block, rows in enumerate(layers, 1)]
        )
        self.head = Product(head, 1 + len(layers), watch)

    def forward(self, x: Tensor) -> Tensor:
        """Go through all."""
        for each in (self.table, *self.layers, self.head):
            x = each(x)
        return x


class Counted(NamedTuple):
    """Calls by bytes, and what lives at each block."""

    calls: Counter[tuple[str, int]]
    forward: list[int]
    backward: list[int]
    gradients: list[int]


def reductions_watched(watch: Watch, head: int) -> AbstractContextManager[object]:
    """Let *watch* note what gradients live when buckets are reduced, of the *head* and before."""
    ready = GradReducePipeline.get_ready_bucket_group_for_reduction

    def noted(pipeline: GradReducePipeline, bucket: int) -> list[int] | None:
        group = ready(pipeline, bucket)
        if group:
            first = pipeline.buffer.parameter_groups[group[0]]
            if first.fsdp_unit_id is not None:
                block = first.fsdp_unit_id + 1
            else:
                of_head = watch.wrapped.module.raw_param["head.weight"]
                block = head if first.params[0] is of_head else 0
            watch.note(watch.gradients, block, watch.made())
        return group

    return patch.object(GradReducePipeline, "get_ready_bucket_group_for_reduction", noted)


def wrapped_model(model: Model, way: Way | None, num_sets: int) -> megatron_fsdp.Wrapper:
    """Return a rank's *model*, of which so many sets of ranks have shards."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=RANKS // EXPERT_RANKS if num_sets == 1 else 1,
        num_distributed_optimizer_instances=num_sets,
        create_gloo_process_groups=False,
    )
    recipe = "mxfp8" if way is not None and way.has_columns else None
    config = SimpleNamespace(
        calculate_per_token_loss=False, init_model_with_meta_device=False, fp8_recipe=recipe
    )
    return megatron_fsdp.wrap(
        config,
        model,
        units=[Layer],
        num_distributed_optimizer_instances=num_sets,
        fp8_param_gather=way is not None,
    )


def run_step(watch: Watch) -> None:
    """Run a step of two microbatches; what lives in the second stays noted."""
    wrapped = watch.wrapped
    wrapped.zero_grad_buffer()
    for wrapped.module.is_last_microbatch in (False, True):
        for levels in watch.levels:
            levels.clear()
        wrapped(torch.zeros(1, 1, requires_grad=True)).sum().backward()
    wrapped.finish_grad_sync()


def counted(layers: list[tuple[int, int]], way: Way | None, num_sets: int = 1) -> Counted:
    """Return what a second step of two microbatches does, and what lives in the second."""
    calls: Counter[tuple[str, int]] = Counter()
    ranks, watch, head = RANKS * num_sets, Watch(), 1 + len(layers)
    groups = {tuple(range(RANKS)): "dp", (0, 2): "edp"}
    groups |= {tuple(range(0, ranks, RANKS)): "replica"} if num_sets > 1 else {}
    with (
        cluster_answered(0, ranks),
        megatron_job.answers(),
        standing(way),
        reductions_watched(watch, head),
    ):
        watch.wrapped = wrapped_model(Model(layers, way, watch), way, num_sets)
        for _ in range(2):
            oracle = RankOracle(groups)
            with oracle:
                run_step(watch)
    for call in oracle.collectives:
        calls[call.op, call.size_bytes] += call.num_calls
    return Counted(calls, *([each[block] for block in range(head + 1)] for each in watch.levels))


def unit_of(rows: tuple[int, int], way: Way | None) -> FlatUnit:
    """Return a layer as it is derived."""
    size, buckets = bucket_size([(rows[0], WIDTH)], RANKS), []
    if way is None:
        buckets = [FlatBucket(size, width=4)]
        of_experts = FlatBucket(0, is_expert=True, width=4)
    else:
        facts = {"width": 1, "has_columns": way.has_columns}
        buckets = [FlatBucket(bucket_size([(WIDTH,)], RANKS))]
        turned = rows[0] * WIDTH * way.transposes, rows[1] * WIDTH * way.transposes
        buckets.append(FlatBucket(size, transposed=turned[0], **facts))
        of_experts = FlatBucket(0, is_expert=True, transposed=turned[1], **facts)
    if rows[1]:
        buckets.append(of_experts._replace(size=bucket_size([(rows[1], WIDTH)], EXPERT_RANKS)))
    return FlatUnit(TRANSFORMER_LAYER, tuple(buckets))


def predicted(layers: list[tuple[int, int]], way: Way | None, num_sets: int = 1) -> Counted:
    """Return the same as it is derived."""
    last, width = 1 + len(layers), 4 if way is None else 2
    end = FlatBucket(bucket_size([(ROWS, WIDTH)], RANKS), width=width)
    bare = UnitWalk(
        ends=(EndBucket(end, 0, 0), EndBucket(end, last, last)),
        num_first=2,
        units=tuple(unit_of(rows, way) for rows in layers),
        num_layers=len(layers),
        steps=(Step(0, (0,)), *(Step(1 + n, unit=n) for n in range(len(layers))), Step(last, (1,))),
    )
    norm = 0 if way is None else WIDTH
    mean = sum(sum(rows) * WIDTH + norm for rows in layers) // len(layers)
    walk = bare.walked(WalkSettings.of(mean))
    calls = Counter({("all_gather", width * end.size): 2})
    reduced = [end, end]
    for unit, vain in zip(walk.units, walk.repeated_gathers, strict=True):
        for bucket, more in zip(unit.buckets, vain, strict=True):
            calls["all_gather", bucket.width * bucket.size] += 2 * (2 + more)
            reduced.append(bucket)
    for bucket in reduced:
        calls["reduce_scatter", GRADIENT_BYTES * bucket.size] += 2
        if num_sets > 1:
            calls["all_reduce", GRADIENT_BYTES * bucket.size // RANKS] += 1
    gradients = [GRADIENT_BYTES * each for each in walk.gradients]
    return Counted(calls, [*walk.forward], [*walk.backward], gradients)


SIZES = [
    [(100_000, 0)] * 3,  # all are gathered ahead of each other: none in vain
    [(100_000, 0)] * 9,
    [(200_000, 0)] * 2,
    [(200_000, 0)] * 4,  # the last one, gathered ahead by the head, is freed for another
    [(200_000, 0)] * 5,
    [(300_000, 0)] * 6,
    [(700_000, 0)] * 4,
    [(500_000, 0), (20_000, 0), (300_000, 0), (20_000, 0)],
    [(60_000, 250_000)] * 4,  # half of a unit ahead
    [(60_000, 90_000)] * 7,
    [(30_000, 600_000)] * 3,
]


@pytest.mark.parametrize("layers", SIZES)
@pytest.mark.parametrize("way", [WIDE, OF_HOPPER, OF_BLACKWELL, IN_BLOCKS])
def test_megatron_fsdp_gathers_and_reduces_as_derived(
    layers: list[tuple[int, int]], way: Way | None
) -> None:
    assert counted(layers, way) == predicted(layers, way)


@pytest.mark.parametrize("way", [WIDE, OF_HOPPER, IN_BLOCKS])
def test_shards_are_summed_over_their_replicas_once_a_step(way: Way | None) -> None:
    layers = [(200_000, 0)] * 4
    assert counted(layers, way, num_sets=2) == predicted(layers, way, num_sets=2)
