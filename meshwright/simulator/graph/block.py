"""A block as it is written down: operators, weights, and until when forward holds on to tensors."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from meshwright.simulator.graph.lowering import Lowering
from meshwright.simulator.graph.operators import Gradient, Kind, Operator, Traffic, Work
from meshwright.simulator.graph.tensors import Dim, Mesh, Placement, Size, Tensor, sum_of


class GivenUp(NamedTuple):
    """What a part of a block makes and gives up in forward, where a plan runs the part again.

    Args:
        part: Name of the part.
        output: What it makes.
        behind: The operator behind which it is given up; backward makes it again ahead of it.
    """

    part: str
    output: Tensor
    behind: Operator


class _Nodes:
    """Numbers operators; those that are fused have one number."""

    def __init__(self) -> None:
        self._numbers = count()
        self._open: int | None = None

    @contextmanager
    def one(self, *, fused: bool) -> Iterator[None]:
        """Make one node of the operators inside, if they are *fused*; inside of one they are it."""
        if self._open is not None:
            yield
            return
        self._open = next(self._numbers) if fused else None
        yield
        self._open = None

    def number(self) -> int:
        """Return the node of the next operator."""
        return next(self._numbers) if self._open is None else self._open


@dataclass(slots=True)
class Block:
    """Operators in the order in which they run; functions of this package add to them.

    Args:
        mesh: Ranks of each axis that has more than one.
        lowering: How operators are run.
        width: Bytes of an activation's element.
        operators: What has been written down.
        weights: Parameters, in the order in which modules hold them.
        casts: Copies in another format that all who read a tensor share, where the stack compiles.
        remade: What backward makes a tensor of again, where the stack compiles.
        held: Until after how many operators forward holds on to a tensor.
        cached: Tensors that live until the forward pass is over.
        buffers: Tensors that all blocks share, and that live from the first pass on.
        given_up: What parts make and may give up.
    """

    mesh: Mesh
    lowering: Lowering
    width: int = 2
    operators: list[Operator] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    casts: dict[Tensor, Tensor] = field(default_factory=dict)
    remade: dict[Tensor, tuple[Tensor, ...]] = field(default_factory=dict)
    held: list[tuple[int, Tensor]] = field(default_factory=list)
    cached: list[Tensor] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    given_up: list[GivenUp] = field(default_factory=list)
    _region: tuple[str, ...] = ()
    _nodes: _Nodes = field(default_factory=_Nodes)
    _prices: _Nodes = field(default_factory=_Nodes)
    _arguments: list[Tensor] = field(default_factory=list)
    _shared: dict[str, Tensor] = field(default_factory=dict)

    def tensor(self, name: str, *dims: Dim, at: Placement | None = None, width: int = 0) -> Tensor:
        """Return a tensor; axes that the mesh lacks do not count in *at*."""
        return Tensor(name, dims, self.placed(at or {}), self.mesh, width or self.width)

    def weight(
        self, name: str, *dims: Dim, at: Placement | None = None, shared: bool = False
    ) -> Tensor:
        """Return a new weight, or a *shared* one: a parameter of another use, here or elsewhere."""
        width = 4 if self.lowering.casts else self.width
        made = Tensor(name, dims, self.placed(at or {}), self.mesh, width, is_weight=True)
        if shared or name in self._shared:
            made = self._shared.setdefault(name, made)
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
        """Hold on to a module's arguments until it returns, also as they are placed for it."""
        outer, self._arguments = self._arguments, [*arguments]
        yield
        self.hold(*self._arguments)
        self._arguments = outer

    def argument(self, *tensors: Tensor) -> None:
        """Hold on to *tensors* until the module that is being written returns."""
        self._arguments += tensors

    def hold(self, *tensors: Tensor) -> None:
        """Hold on to *tensors* until here."""
        self.held += [(len(self.operators), each.storage) for each in tensors]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Name a part of the block, which a plan may run again in backward."""
        outer, self._region = self._region, (*self._region, name)
        yield
        self._region = outer

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Write operators that no part of the block has: they run once, whatever runs again."""
        outer, self._region = self._region, ()
        yield
        self._region = outer

    def give_up(self, part: str, output: Tensor) -> None:
        """Give *output* of a part up here, where the part runs again in backward."""
        self.given_up.append(GivenUp(part, output.storage, self.operators[-1]))

    def one_node(self, *, fused: bool) -> AbstractContextManager[None]:
        """Make one autograd node of the operators inside, where they are *fused*."""
        return self._nodes.one(fused=fused)

    def one_price(self) -> AbstractContextManager[None]:
        """Price the products inside, of one input, as if they were one."""
        return self._prices.one(fused=True)

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
            inputs: What it reads.
            outputs: What it makes.
            gradients: Its backward.
            work: What it runs forward.
            kind: What it is.
            eight_bits: Whether it is of a linear layer that multiplies in fp8.
            scratch: What lives while it runs, forward and backward.
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
