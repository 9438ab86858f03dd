"""Blocks that are written as graphs: what a walk says of their operators, parameters and bytes."""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, cast

from meshwright.hwprofiles import Recompute
from meshwright.simulator.blocks.chain import linear_layer
from meshwright.simulator.blocks.images import bottleneck, classifier, stem
from meshwright.simulator.blocks.layer import accumulation
from meshwright.simulator.blocks.operators import (
    BlockOperators,
    Collective,
    Gemm,
    HostPasses,
    ImplicitGemm,
    KernelLaunches,
    MemoryBound,
    Operator,
)
from meshwright.simulator.blocks.shape import BlockShape
from meshwright.simulator.graph import (
    Backward,
    Block,
    Convolution,
    FusedAttention,
    Loss,
    Lowering,
    Memory,
    Phase,
    Product,
    Repetition,
    Step,
    Tape,
    Tensor,
    Traffic,
    Transfer,
    WeightGradients,
)
from meshwright.simulator.layout import Axis
from meshwright.simulator.model import (
    EMBEDDING,
    HEAD,
    BlockKind,
    ChainModel,
    ImageModel,
    LinearLayer,
)

HOST_PASSES = {Phase.FORWARD: 1, Phase.RECOMPUTE: 0, Phase.BACKWARD: 2}


class WalkedBlock(NamedTuple):
    """What a walk through a block says of it, for one microbatch on one rank.

    Args:
        operators: What it runs.
        parameters: Elements of each weight tensor.
        input_bytes: The activation that goes into it.
        output_bytes: The one that comes out.
        memory: Bytes of its passes.
        keeps_input: Backward of it reads its input.
        keeps_output: The same of its output.
    """

    operators: BlockOperators
    parameters: tuple[int, ...]
    input_bytes: int
    output_bytes: int
    memory: Memory
    keeps_input: bool
    keeps_output: bool


EMPTY = WalkedBlock(
    BlockOperators(forward=(), backward=()),
    (),
    0,
    0,
    Memory(0, 0, 0, 0, 0, 0),
    keeps_input=False,
    keeps_output=False,
)


@lru_cache(maxsize=4096)
def walked_block(shape: BlockShape, kind: BlockKind) -> WalkedBlock:
    """Return what a walk through a block of *kind* says of it."""
    mesh = {Axis.TP: shape.tp} if shape.tp > 1 else {}
    block = Block(mesh, lowering_of(shape), shape.element_bytes)
    given = _write(block, shape, kind)
    if given is None:
        return EMPTY
    repeats = {"layer"} if shape.recompute is Recompute.FULL else set()
    tape = Tape(block, Repetition(frozenset(repeats), shape.stack.recompute_stops_early))
    tape.run_forward(given)
    saved = {each.storage for tensors in tape.saved.values() for each in tensors}
    backward = Backward(tape, block.lowering.weight_gradients)
    backward.run()
    made = block.operators[-1].outputs[0]
    parameters = tuple(_number(each.numel) for each in block.weights)
    return WalkedBlock(
        operators=_operators(shape, kind, tape.steps, sum(parameters)),
        parameters=parameters,
        input_bytes=_number(given.nbytes),
        output_bytes=_number(made.nbytes),
        memory=Memory.of(backward),
        keeps_input=given.storage in saved,
        keeps_output=made.storage in saved,
    )


def _write(block: Block, shape: BlockShape, kind: BlockKind) -> Tensor | None:
    """Write a block of *kind* down; return what goes into it, or None if there is nothing."""
    model, num_samples = shape.trained, shape.microbatch_size
    match model:
        case ImageModel() if kind == EMBEDDING:
            return stem(block, model, num_samples)
        case ImageModel() if kind == HEAD:
            return classifier(block, model, num_samples)
        case ImageModel():
            return bottleneck(block, model.layer(kind), num_samples)
        case ChainModel() if kind not in {EMBEDDING, HEAD}:
            return linear_layer(block, num_samples, model.layer(kind))
    return None


def lowering_of(shape: BlockShape) -> Lowering:
    """Return how the stack of *shape* runs operators."""
    stack = shape.stack
    gradients = WeightGradients.ADDED
    if stack.fused_gradient_accumulation:
        gradients = WeightGradients.FUSED
    return Lowering(
        fuses_products=stack.fused_qkv,
        fuses_places=stack.fused_qkv,
        fuses_residual=False,
        saves_first=not stack.fused_qkv,
        weight_gradients=gradients,
        loss=Loss.EAGER,
        casts=shape.casts_weights,
        caches_casts=shape.caches_casts,
    )


def _operators(
    shape: BlockShape, kind: BlockKind, steps: list[Step], num_parameters: int
) -> BlockOperators:
    """Return the work of each phase; each of its pieces is a kernel that is launched."""
    phases: dict[Phase, tuple[Operator, ...]] = {}
    for phase in Phase:
        run = tuple(_operator(each) for each in steps if each.phase is phase)
        count = sum(not isinstance(item, Collective) for item in run)
        ends = (
            KernelLaunches(f"{kind} {phase}", count),
            HostPasses(f"{kind} {phase}", HOST_PASSES[phase]),
        )
        phases[phase] = (*run, *ends) if run else ()
    added = (accumulation(shape, num_parameters),)
    return BlockOperators(
        forward=phases[Phase.FORWARD],
        backward=phases[Phase.BACKWARD] + added,
        recompute=phases[Phase.RECOMPUTE],
    )


def _operator(step: Step) -> Operator:
    """Return the work of a step as something that has a price."""
    name = "loss" if "loss" in step.operator.region else step.operator.name
    if step.phase is Phase.BACKWARD:
        name = f"{name} gradient"
    match step.work:
        case Product(m, n, k, batch):
            return Gemm(name, *(_number(each) for each in (m, n, k, batch)))
        case Convolution() as work:
            return ImplicitGemm(name, *(_number(each) for each in work))
        case Traffic(nbytes):
            return MemoryBound(name, _number(nbytes))
        case Transfer(op, axis, nbytes):
            return Collective(f"{axis} {op}", op, _number(nbytes), axis)
        case FusedAttention():
            raise AssertionError(f"{name}: no such block here has attention")


def _number(size: object) -> int:
    """Return a size that is no column."""
    return cast("int", size)
