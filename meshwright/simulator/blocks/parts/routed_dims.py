"""Ranks that share the experts of a layer, and the dims of what they compute."""

from fractions import Fraction
from typing import NamedTuple

from meshwright.simulator.graph import PARTIAL, Block, Dim, Placement, Size, Tensor, view
from meshwright.simulator.layout import Axis, MeshAxis
from meshwright.simulator.model import Experts

EXPERTS = "experts"  # the part of a block whose weights are a unit of their own, if ranks divide it


class ExpertMesh(NamedTuple):
    """Ranks that share the experts of a layer.

    Args:
        split_on: The axis that splits widths of experts: that of other layers, if as many ranks do.
        told: The axis of all ranks that have parts of an expert, or other experts.
        ranks: Ranks with different experts.
        is_divided: There are several.
        has_one: A rank has one expert.
        hottest: Rows of the rank with the hottest expert over those of all ranks on average.
        widens_shares: Tokens go with their shares in fp32.
        capacity: Rows that an expert takes of a rank's tokens over the mean, if these are fixed.
    """

    split_on: MeshAxis = Axis.TP
    told: MeshAxis = Axis.TP
    ranks: Size = 1
    is_divided: bool = False
    has_one: bool = False
    hottest: Fraction = Fraction(1)
    widens_shares: bool = False
    capacity: Fraction | None = None

    def rows_taken(self, rows: Size, num_experts: Size) -> Size:
        """Return those of a rank's *rows* that experts take: of each as many as its capacity.

        get_capacity of megatron/core/transformer/moe/moe_utils.py, core 0.16.

        >>> ExpertMesh(capacity=Fraction(5, 4)).rows_taken(2 * 4096, 128)
        10240
        >>> ExpertMesh().rows_taken(2 * 4096, 128)
        8192
        """
        if self.capacity is None:
            return rows
        whole, part = self.capacity.as_integer_ratio()
        return -(-rows * whole // (num_experts * part)) * num_experts


def hottest_share(experts: Experts, ranks: int, imbalance: float) -> Fraction:
    """Return the load of the rank with the hottest expert over the mean of *ranks*.

    Of E experts the hottest has *imbalance* times the mean, all others have what is left, equally;
    with n experts a rank the hottest rank has ``(X + (n - 1) (E - X) / (E - 1)) / n``.

    >>> experts = Experts(num_experts=8, experts_per_token=2, hidden_size=64)
    >>> [str(hottest_share(experts, ranks, 2.0)) for ranks in (1, 4, 8)]
    ['1', '10/7', '2']
    """
    total, num_local = experts.num_experts, experts.num_experts // ranks
    if total == num_local or imbalance == 1:
        return Fraction(1)
    hot = Fraction(imbalance).limit_denominator(1000)
    others = (num_local - 1) * (total - hot) / (total - 1)
    return (hot + others) / num_local


class RoutedDims(NamedTuple):
    """Dims: all experts, those of a token, tokens, rows of experts; an expert's widths.

    ``first`` are the outputs of its first product, a gate, if it has one, and a value.
    ``rows`` are those that the ranks of an expert compute, if they have equally many; ``arrived``
    those that they do compute, if they are the ranks with the hottest one.
    """

    experts: Dim
    chosen: Dim
    tokens: Dim
    rows: Dim
    arrived: Dim
    gate: Dim
    up: Dim
    inner: Dim
    mesh: ExpertMesh
    first: Dim

    @classmethod
    def of(cls, x: Tensor, experts: Experts, mesh: ExpertMesh) -> "RoutedDims":
        """Return the dims of *experts* on *mesh* behind tokens *x*."""
        tokens: Size = x.dims[0].size * x.dims[1].size
        width, rows = experts.hidden_size, tokens * experts.experts_per_token
        first = experts.num_parts * width
        if mesh.split_on is not Axis.TP or mesh.capacity is not None:
            # A rank's own tokens, of each rank of an expert.
            own = mesh.rows_taken(rows // x.mesh.get(Axis.TP, 1), experts.num_experts)
            rows = own * x.mesh.get(mesh.split_on, 1)
        sent = arrived = Dim("rows", rows)
        if mesh.hottest != 1:
            share = mesh.hottest
            arrived = Dim("rows", -(-rows * share.numerator // share.denominator))
        return cls(
            experts=Dim("experts", experts.num_experts),
            chosen=Dim("chosen experts", experts.experts_per_token),
            tokens=Dim("tokens of all sequences", tokens),
            rows=sent,
            arrived=arrived,
            gate=Dim("expert gate", width),
            up=Dim("expert up", width),
            inner=Dim("expert inner", width),
            mesh=mesh,
            first=Dim("expert gate and up" if experts.gated else "expert up", first),
        )

    @property
    def parts(self) -> tuple[Dim, ...]:
        """What the first product of an expert makes: a gate, where there is one, and a value."""
        return (self.gate, self.up) if self.first.size == 2 * self.up.size else (self.up,)

    @property
    def num_local(self) -> Size:
        """Experts of a rank."""
        return self.experts.size // self.mesh.ranks

    def flat(self, block: Block, x: Tensor) -> Tensor:
        """Return tokens *x* with one dim for tokens and sequences."""
        return view(block, x, self.tokens, x.dims[-1], renamed=(x.dims[0], self.tokens))

    def rows_at(self, flat: Tensor) -> Placement:
        """Return where the rows of a rank's own tokens lie."""
        split_on = self.mesh.split_on
        if split_on is not Axis.TP:
            return {split_on: self.rows} if split_on in flat.mesh else {}
        return {axis: self.rows if dim is self.tokens else dim for axis, dim in flat.at.items()}

    def partial(self, block: Block) -> Placement:
        """Return where a sum over the widths of experts lies."""
        return block.placed({self.mesh.split_on: PARTIAL})
