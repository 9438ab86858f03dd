"""Table of blocks by shape and kind: each structure is walked once, with columns of sizes."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain, repeat
from typing import Any, NamedTuple, TypeVar, cast

from meshwright.hwprofiles import Recompute
from meshwright.simulator.blocks.dims import Columns, expert_mesh
from meshwright.simulator.blocks.kinds import (
    ADDED,
    BorderGradients,
    Written,
    keeps_output,
    lowering_of,
    outputs_again,
    saved_offload,
    walk,
    written,
)
from meshwright.simulator.blocks.operators import BlockOperators, ExpertOperators
from meshwright.simulator.blocks.parts import EXPERTS
from meshwright.simulator.blocks.priced import PricedBlock, expert_operators
from meshwright.simulator.blocks.shape import BlockShape
from meshwright.simulator.graph import (
    Backward,
    BlockMemory,
    NestedMemory,
    SavedOffload,
    Size,
    Tensor,
    column,
)
from meshwright.simulator.model import (
    EMBEDDING,
    ENDS,
    EXPERT_LAYERS,
    HEAD,
    LAYERS,
    BlockKind,
    KeptLayer,
    LayerGroup,
    ModelSpec,
    OffloadedLayer,
    has_mtp_layers,
)

Phases = TypeVar("Phases", BlockOperators, ExpertOperators)


class NamedBytes(NamedTuple):
    """A tensor and its bytes."""

    name: str
    size_bytes: int


@dataclass
class _Walk:
    """A walk shared by *count* shapes."""

    priced: PricedBlock
    count: int
    known: dict[SavedOffload, list[BlockMemory[int]]] = field(default_factory=dict)

    @cached_property
    def columns(self) -> BlockOperators:
        """Operators of the block, in columns where shapes differ."""
        return self.priced.operators()

    @cached_property
    def operators(self) -> list[BlockOperators]:
        """Operators of the block for each shape."""
        return _operator_rows(self.columns, self.count)

    @cached_property
    def expert_operators(self) -> list[ExpertOperators]:
        """Operators between dispatch and combine, for each shape."""
        return _operator_rows(expert_operators(self.priced), self.count)

    @cached_property
    def nested(self) -> list[NestedMemory]:
        """Memory around its routed experts, for each shape."""
        memory = NestedMemory.of(self.priced.walk, EXPERTS)
        return [NestedMemory(*row) for row in _rows_of(memory, self.count)]

    def offloaded(self, offload: SavedOffload) -> list[BlockMemory[int]]:
        """Return the memory of the block with activation *offload*, for each shape."""
        if offload not in self.known:
            backward = self.priced.walk
            memory = BlockMemory.of(backward, offload.tensors(backward))
            self.known[offload] = [BlockMemory(*row) for row in _rows_of(memory, self.count)]
        return self.known[offload]


class _Row(NamedTuple):
    """A walk, a row of its columns, and that row's memory."""

    walk: _Walk
    memory: BlockMemory[int]
    row: int


class BlockTable:
    """Operators and memory of blocks, computed once for all plans that share them.

    Results are pure functions of the arguments.  `prepare` walks many shapes at once, one walk
    for all that have the same structure; what was not prepared is walked when it is asked for.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[BlockShape, BlockKind, BorderGradients], _Row] = {}
        self._written: dict[tuple[object, ...], Written] = {}
        self._memory: dict[tuple[BlockShape, BlockKind, BorderGradients], BlockMemory[int]] = {}
        self._tensors: dict[tuple[BlockShape, BlockKind, bool], tuple[NamedBytes, ...]] = {}

    def prepare(
        self,
        shapes: Sequence[BlockShape],
        kinds: Sequence[BlockKind] = (),
        ending: BorderGradients = ADDED,
    ) -> None:
        """Walk the blocks of *kinds* (default: all) of all *shapes*, structure by structure."""
        for kind in kinds or (shapes[0].parameters if shapes else ()):
            if isinstance(kind, KeptLayer):
                self.prepare([kept_shape(shape) for shape in shapes], [kind.layer], ending)
                continue
            if isinstance(kind, OffloadedLayer):
                self.prepare(shapes, [kind.layer], ending)
                continue
            alike: dict[tuple[object, ...], list[BlockShape]] = defaultdict(list)
            for shape in shapes:
                if (shape, kind, ending) not in self._rows:
                    alike[_structure(shape, kind)].append(shape)
            for structure, group in alike.items():
                self._prepare(group, kind, ending, structure)

    def _prepare(
        self,
        group: Sequence[BlockShape],
        kind: BlockKind,
        ending: BorderGradients,
        structure: tuple[object, ...],
    ) -> None:
        """Walk a *group* of shapes: the graph is made once, whatever is recomputed."""
        sizes_of_shapes = [_columns(shape, kind) for shape in group]
        rows = {sizes: row for row, sizes in enumerate(dict.fromkeys(sizes_of_shapes))}
        columns = Columns(*(column(each) for each in zip(*rows, strict=True)))
        key = kind, structure, *rows
        if key not in self._written:
            self._written[key] = written(group[0], kind, columns)
        shapes_by_recompute: dict[object, dict[BlockShape, int]] = defaultdict(dict)
        for shape, sizes in zip(group, sizes_of_shapes, strict=True):
            recomputation = shape.recompute, shape.modules
            key_of_group = recomputation if _has_layers(shape, kind) else None
            shapes_by_recompute[key_of_group][shape] = rows[sizes]
        for shapes in shapes_by_recompute.values():
            first = next(iter(shapes))
            backward = walk(first, kind, self._written[key], ending=ending)
            walked = _Walk(PricedBlock(first, columns, kind, backward), len(rows))
            self._add(walked, shapes, ending)

    def operators(self, shape: BlockShape, kind: BlockKind) -> BlockOperators:
        """Return the operators of one microbatch in a block."""
        if isinstance(kind, LayerGroup):
            each = [self.operators(shape, layer) for layer in kind.layers]
            return BlockOperators(*(tuple(chain(*phase)) for phase in zip(*each, strict=True)))
        walked, _, row = self._row(shape, kind, ADDED)
        return walked.operators[row]

    def columns(
        self, shapes: Sequence[BlockShape], kind: BlockKind
    ) -> Iterator[tuple[BlockOperators, list[int], list[int]]]:
        """Yield the operators of blocks of *shapes*, walk by walk, in columns of sizes.

        With them come the rows of the shapes asked for, and their positions among *shapes*.
        """
        of_walk: dict[int, tuple[_Walk, list[int], list[int]]] = {}
        for place, shape in enumerate(shapes):
            walked, _, row = self._row(shape, kind, ADDED)
            _, rows, places = of_walk.setdefault(id(walked), (walked, [], []))
            rows.append(row)
            places.append(place)
        for walked, rows, places in of_walk.values():
            yield walked.columns, rows, places

    def expert_operators(self, shape: BlockShape, kind: BlockKind) -> ExpertOperators:
        """Return the operators between dispatch and combine."""
        walked, _, row = self._row(shape, kind, ADDED)
        return walked.expert_operators[row]

    def memory(
        self, shape: BlockShape, kind: BlockKind, ending: BorderGradients = ADDED
    ) -> BlockMemory[int]:
        """Return the memory of a block."""
        key = (shape, kind, ending)
        if key not in self._memory:
            memory = self._row(shape, kind, ending).memory
            self._memory[key] = _without_output(memory, shape, kind)
        return self._memory[key]

    def nested_memory(
        self, shape: BlockShape, kind: BlockKind, ending: BorderGradients
    ) -> NestedMemory:
        """Return the memory around the routed experts of a block."""
        walked, _, row = self._row(shape, kind, ending)
        return walked.nested[row]

    def saved_tensors(
        self, shape: BlockShape, kind: BlockKind, *, repeats: bool = True
    ) -> tuple[NamedBytes, ...]:
        """Return the saved tensors of a block for one microbatch.

        Args:
            shape: Shape of the block.
            kind: Kind of block.
            repeats: Whether backward recomputes as the plan says; else nothing is recomputed.
        """
        if isinstance(kind, KeptLayer):
            return self.saved_tensors(kept_shape(shape), kind.layer, repeats=repeats)
        if isinstance(kind, OffloadedLayer):
            return self.saved_tensors(shape, kind.layer, repeats=repeats)
        key = (shape, kind, repeats)
        if key not in self._tensors:
            if repeats or shape.recompute is Recompute.NONE:  # the walk at hand has them
                walked, _, row = self._row(shape, kind, ADDED)
                self._tensors[key] = tuple(_saved(walked.priced.walk, row))
            else:
                self._tensors[key] = tuple(_saved(walk(shape, kind, repeats=False)))
        return self._tensors[key]

    def _row(self, shape: BlockShape, kind: BlockKind, ending: BorderGradients) -> _Row:
        if isinstance(kind, KeptLayer):
            return self._row(kept_shape(shape), kind.layer, ending)
        if isinstance(kind, OffloadedLayer):
            # Offload changes the memory, not the walk.
            walked, _, row = self._row(shape, kind.layer, ending)
            return _Row(walked, walked.offloaded(saved_offload(shape))[row], row)
        key = (shape, kind, ending)
        if key not in self._rows:
            backward = walk(shape, kind, ending=ending)
            block = PricedBlock(shape, _columns(shape, kind), kind, backward)
            self._add(_Walk(block, 1), {shape: 0}, ending)
        return self._rows[key]

    def _add(
        self, walked: _Walk, shapes: Mapping[BlockShape, int], ending: BorderGradients
    ) -> None:
        """Store the memory of each of *shapes*, by its row of *walked*."""
        memory = BlockMemory.of(walked.priced.walk)
        rows = [BlockMemory(*row) for row in _rows_of(memory, walked.count)]
        for shape, row in shapes.items():
            self._rows[shape, walked.priced.kind, ending] = _Row(walked, rows[row], row)


def _rows_of(sizes: Iterable[Size], count: int) -> Iterator[tuple[int, ...]]:
    """Yield the rows of columns of *sizes*, one for each of *count* shapes."""
    columns = (repeat(size, count) if isinstance(size, int) else size.tolist() for size in sizes)
    yield from zip(*columns, strict=True)


@lru_cache  # a table's shapes hash slowly, and each is asked for of every stage
def kept_shape(shape: BlockShape) -> BlockShape:
    """Return *shape* with layers that are not recomputed."""
    return replace(shape, recompute=Recompute.NONE, modules=())


def _without_output(
    memory: BlockMemory[int], shape: BlockShape, kind: BlockKind
) -> BlockMemory[int]:
    """Return the memory of a block, its output counted with the next block.

    Both save one tensor where a block ends with an activation, whose backward reads its output. So
    the output of a stage's last block counts on the next rank alone.
    """
    model = shape.trained
    if isinstance(model, ModelSpec) or kind == EMBEDDING:
        return memory
    layers = [run.kind for run in model.layer_runs]
    is_layer = kind in layers
    output_bytes = memory.sent if is_layer and keeps_output(shape, kind) else 0
    input_bytes = memory.received if not is_layer and keeps_output(shape, layers[-1]) else 0
    shift = output_bytes - input_bytes
    return memory._replace(
        saved=memory.saved - shift,
        forward=memory.forward + shift,
        backward=memory.backward + shift,
        arrival=memory.arrival + shift,
        holding=memory.holding + shift,
    )


def _has_layers(shape: BlockShape, kind: BlockKind) -> bool:
    """Return True if a block has layers, or context-parallel messages as an MTP head has."""
    return kind not in ENDS or (kind == HEAD and has_mtp_layers(shape.trained))


def _has_experts(kind: BlockKind) -> bool:
    """Return True if a block may have routed experts."""
    return kind not in LAYERS or kind in EXPERT_LAYERS


def _columns(shape: BlockShape, kind: BlockKind) -> Columns:
    """Return the sizes of a block's graph; sizes that it does not read are 1."""
    sizes = Columns.of(shape)
    if _has_layers(shape, kind) and _has_experts(kind):
        return sizes
    return sizes._replace(ep=1, expert_tp=1, accumulated_bytes=1)


def _structure(shape: BlockShape, kind: BlockKind) -> tuple[object, ...]:
    """Return the key of a block's graph: all but sizes, and recomputation.

    In fp8 the saved inputs of linear layers depend on recomputation, too.
    """
    common = (
        shape.tp > 1,
        shape.sequence_parallel,
        shape.keeps_outputs,
        shape.defers_norm_all_reduce,
        # With one sequence DTensor's transposes of tokens and sequences are views.
        shape.microbatch_size > 1 and not shape.stack.megatron_layers,
    )
    if not _has_layers(shape, kind):
        return common
    layers: tuple[object, ...] = (*common, shape.attention, shape.cp_type, shape.cp_inner)
    if not isinstance(shape.trained, ModelSpec):
        return layers
    layers += (shape.local_kv_width < shape.local_width, shape.has_groups, outputs_again(shape))
    if not _has_experts(kind):
        return layers
    splits = not shape.splits_experts_alike and shape.expert_tp > 1
    mesh = expert_mesh(shape, shape.ep if _runs_by_expert(shape) else 1)
    return (*layers, splits, shape.dispatcher, mesh)


def _runs_by_expert(shape: BlockShape) -> bool:
    """Return True if a rank's experts are sequential, each with operators of its own."""
    return shape.stack.megatron_layers and not lowering_of(shape).groups_experts


def _saved(backward: Backward, row: int = 0) -> Iterator[NamedBytes]:
    """Yield the tensors alive when forward has returned, with the bytes of one row."""
    live: dict[Tensor, None] = {}
    for tensor, sign in backward.tape.storages.events[: backward.tape.marks.returned]:
        if sign > 0:
            live[tensor] = None
        else:
            del live[tensor]
    sizes = ((each.name, each.nbytes) for each in live)
    for name, size in sizes:
        yield NamedBytes(name, size if isinstance(size, int) else int(size[row]))


def _operator_rows(operators: Phases, count: int) -> list[Phases]:
    """Return the *operators* of each of *count* shapes, from columns of sizes."""
    phases = [
        list(zip(*(_rows(each, count) for each in phase), strict=True)) or [()] * count
        for phase in operators
    ]
    return [type(operators)(*each) for each in zip(*phases, strict=True)]


def _rows(value: object, count: int) -> Iterable[object]:
    """Return *count* rows of an operator or a size with columns."""
    if isinstance(value, int | str | None):
        return repeat(value, count)
    if isinstance(value, tuple):
        each = zip(*(_rows(part, count) for part in value), strict=True)
        return map(cast("Any", type(value))._make, each)
    return cast("list[int]", cast("Any", value).tolist())
