"""Builder of a block's graph: operators, weights and lifetimes of forward tensors."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from meshwright.simulator.graph.lowering import Lowering
from meshwright.simulator.graph.operators import Gradient, Kind, Operator, Traffic, Work
from meshwright.simulator.graph.tensors import Dim, Mesh, Placement, Size, Tensor, sum_of


class Discarded(NamedTuple):
    """An output that forward discards, where a plan recomputes the part that makes it.

    Args:
        part: Name of the part.
        output: Storage of the output.
        behind: The operator after which it is discarded; backward recomputes it before that one.
    """

    part: str
    output: Tensor
    behind: Operator


class _Numbering:
    """Counter of operators' numbers; fused operators share one."""

    def __init__(self) -> None:
        self._numbers = count()
        self._open: int | None = None

    @contextmanager
    def share_number(self, *, fused: bool) -> Iterator[None]:
        """Give the operators inside one number, if they are *fused*; the outermost call wins."""
        # Nested calls join the outer node.
        if self._open is not None:
            yield
            return
        self._open = next(self._numbers) if fused else None
        yield
        self._open = None

    def number(self) -> int:
        """Return the number of the next operator."""
        return next(self._numbers) if self._open is None else self._open


@dataclass(slots=True)
class Block:
    """Operators of a block in the order in which they run.

    Args:
        mesh: Ranks of each axis that has more than one.
        lowering: Kernels and autograd nodes of the software stack.
        width: Bytes of an activation's element.
        operators: Operators added so far.
        weights: Parameters, in the order of the modules.
        casts: Cast copy of each tensor that all readers share, under torch.compile.
        recompute_inputs: Tensors that backward recomputes a tensor from, under torch.compile.
        held: Tensors with the number of operators after which Python's last reference goes.
        cached: Tensors that live until the forward pass is over (autocast's weight cache).
        buffers: Global buffers that all blocks share, allocated in the first pass.
        discarded: Outputs that recomputation may discard.
    """

    mesh: Mesh
    lowering: Lowering
    width: int = 2
    operators: list[Operator] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    casts: dict[Tensor, Tensor] = field(default_factory=dict)
    recompute_inputs: dict[Tensor, tuple[Tensor, ...]] = field(default_factory=dict)
    held: list[tuple[int, Tensor]] = field(default_factory=list)
    cached: list[Tensor] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    discarded: list[Discarded] = field(default_factory=list)
    _region: tuple[str, ...] = ()
    _nodes: _Numbering = field(default_factory=_Numbering)
    _prices: _Numbering = field(default_factory=_Numbering)
    _arguments: list[Tensor] = field(default_factory=list)
    _shared: dict[str, Tensor] = field(default_factory=dict)

    def tensor(self, name: str, *dims: Dim, at: Placement | None = None, width: int = 0) -> Tensor:
        """Return a new tensor; axes of *at* that the mesh lacks are dropped."""
        return Tensor(name, dims, self.placed(at or {}), self.mesh, width or self.width)

    def weight(
        self, name: str, *dims: Dim, at: Placement | None = None, shared: bool = False
    ) -> Tensor:
        """Return a new weight; a *shared* one belongs to another block or an earlier use."""
        # Under autocast the parameters themselves are fp32.
        width = 4 if self.lowering.casts else self.width
        made = Tensor(name, dims, self.placed(at or {}), self.mesh, width, is_weight=True)
        if shared or name in self._shared:
            made = self._shared.setdefault(name, made)
        # A shared weight is counted in the block that owns it.
        if not shared:
            self.weights.append(made)
        return made

    def placed(self, at: Placement) -> Placement:
        """Return *at* on the axes of the mesh."""
        return {axis: dim for axis, dim in at.items() if axis in self.mesh}

    def traffic(self, *tensors: Tensor) -> Traffic:
        """Return the traffic of reading or writing *tensors* once, in the block's format."""
        return Traffic(self.count(*tensors) * self.width)

    @staticmethod
    def count(*tensors: Tensor) -> Size:
        """Return the elements of *tensors*."""
        return sum_of(each.numel for each in tensors)

    @contextmanager
    def module(self, *arguments: Tensor) -> Iterator[None]:
        """Keep a module's arguments, also redistributed ones, alive until its forward returns."""
        outer, self._arguments = self._arguments, [*arguments]
        yield
        self.hold(*self._arguments)
        self._arguments = outer

    def argument(self, *tensors: Tensor) -> None:
        """Keep *tensors* alive until the current module's forward returns."""
        self._arguments += tensors

    def hold(self, *tensors: Tensor) -> None:
        """Keep *tensors* alive until here: a local variable refers to them."""
        self.held += [(len(self.operators), each.storage) for each in tensors]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Name a part of the block, which a plan may recompute in backward."""
        outer, self._region = self._region, (*self._region, name)
        yield
        self._region = outer

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Add operators outside of every part: they are never recomputed."""
        outer, self._region = self._region, ()
        yield
        self._region = outer

    def discard(self, part: str, output: Tensor) -> None:
        """Discard *output* of a part here, where the part is recomputed in backward."""
        self.discarded.append(Discarded(part, output.storage, self.operators[-1]))

    def autograd_node(self, *, fused: bool) -> AbstractContextManager[None]:
        """Make one autograd node of the operators inside, where they are *fused*."""
        return self._nodes.share_number(fused=fused)

    def merged_gemm(self) -> AbstractContextManager[None]:
        """Price the GEMMs inside, which read one input, as one."""
        return self._prices.share_number(fused=True)

    def add(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        gradients: Sequence[Gradient],
        *work: Work,
        kind: Kind = Kind.OTHER,
        eight_bits: bool = False,
        scratch: tuple[Sequence[Tensor], Sequence[Tensor]] = ((), ()),
    ) -> Tensor:
        """Add an operator and return its first output.

        Args:
            inputs: Tensors it reads.
            outputs: Tensors it makes; the first is returned.
            gradients: Its backward.
            work: Its forward kernels and collectives.
            kind: Kind of operator.
            eight_bits: Whether it belongs to an fp8 linear layer.
            scratch: Temporary tensors of forward and of backward.
        """
        operator = Operator(
            kind,
            tuple(inputs),
            tuple(outputs),
            work,
            tuple(gradients),
            self._nodes.number(),
            self._prices.number(),
            self._region,
            self.lowering.saves_first,
            eight_bits,
            tuple(scratch[0]),
            tuple(scratch[1]),
        )
        self.operators.append(operator)
        return outputs[0]
