"""Expert-parallel layout of a layer, and dims of its routed experts."""

from fractions import Fraction
from typing import NamedTuple

from meshwright.simulator.graph import PARTIAL, Block, Dim, Placement, Size, Tensor, view
from meshwright.simulator.layout import Axis, MeshAxis
from meshwright.simulator.model import Experts

EXPERTS = "experts"  # part of a block that is an FSDP unit of its own under expert parallelism


class ExpertMesh(NamedTuple):
    """Expert-parallel layout of a layer.

    Args:
        split_on: Axis of expert tensor parallelism: tp, or an axis of its own.
        group: Axis of all ranks of the layer's experts, ep and expert tp together.
        ranks: Expert-parallel degree.
        is_divided: Whether it exceeds 1.
        has_one: Whether a rank has one local expert.
        hottest: Tokens of the rank with the hottest expert, over the mean of all ranks.
        widens_shares: Dispatch sends routing weights in fp32.
        capacity: Capacity factor, if any.
    """

    split_on: MeshAxis = Axis.TP
    group: MeshAxis = Axis.TP
    ranks: Size = 1
    is_divided: bool = False
    has_one: bool = False
    hottest: Fraction = Fraction(1)
    widens_shares: bool = False
    capacity: Fraction | None = None

    def rows_taken(self, rows: Size, num_experts: Size) -> Size:
        """Return the rows that experts process: with a capacity factor, capacity times experts.

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
    """Dims of routed experts: experts, experts of a token (top-k), tokens, rows, and widths.

    A row is a token copied for one expert.  ``first`` is the output of the gate and up projection.
    ``rows`` are a rank's rows under balanced routing, ``arrived`` those of the rank with the
    hottest expert.
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
            # Each expert-tp rank gathers the rows of the group's other ranks.
            local_rows = mesh.rows_taken(rows // x.mesh.get(Axis.TP, 1), experts.num_experts)
            rows = local_rows * x.mesh.get(mesh.split_on, 1)
        balanced = arrived = Dim("rows", rows)
        if mesh.hottest != 1:
            share = mesh.hottest
            arrived = Dim("rows", -(-rows * share.numerator // share.denominator))
        return cls(
            experts=Dim("experts", experts.num_experts),
            chosen=Dim("chosen experts", experts.experts_per_token),
            tokens=Dim("tokens of all sequences", tokens),
            rows=balanced,
            arrived=arrived,
            gate=Dim("expert gate", width),
            up=Dim("expert up", width),
            inner=Dim("expert inner", width),
            mesh=mesh,
            first=Dim("expert gate and up" if experts.gated else "expert up", first),
        )

    @property
    def parts(self) -> tuple[Dim, ...]:
        """Dims of the first projection: gate, if there is one, and up."""
        return (self.gate, self.up) if self.first.size == 2 * self.up.size else (self.up,)

    @property
    def num_local(self) -> Size:
        """Local experts of a rank."""
        return self.experts.size // self.mesh.ranks

    def flat(self, block: Block, x: Tensor) -> Tensor:
        """Return tokens *x* with tokens and sequences flattened."""
        return view(block, x, self.tokens, x.dims[-1], renamed=(x.dims[0], self.tokens))

    def rows_at(self, flat: Tensor) -> Placement:
        """Return the placement of the rows of a rank's own tokens."""
        split_on = self.mesh.split_on
        if split_on is not Axis.TP:
            return {split_on: self.rows} if split_on in flat.mesh else {}
        return {axis: self.rows if dim is self.tokens else dim for axis, dim in flat.at.items()}

    def partial(self, block: Block) -> Placement:
        """Return the placement of a partial sum over expert tensor parallelism."""
        return block.placed({self.mesh.split_on: PARTIAL})
