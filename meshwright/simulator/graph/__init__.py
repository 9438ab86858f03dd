"""A block written once: operators over tensors with named dims, and what a walk derives of it."""

from meshwright.simulator.graph.attention import Heads, flash, scored
from meshwright.simulator.graph.backward import Backward
from meshwright.simulator.graph.block import Block
from meshwright.simulator.graph.linear import (
    Linear,
    columns,
    place,
    product,
    row,
    whole_product,
)
from meshwright.simulator.graph.lowering import EightBits, Loss, Lowering, WeightGradients
from meshwright.simulator.graph.memory import Memory
from meshwright.simulator.graph.operators import (
    FusedAttention,
    Gradient,
    Kind,
    Operator,
    Product,
    Traffic,
    Transfer,
)
from meshwright.simulator.graph.order import Repetition
from meshwright.simulator.graph.pointwise import (
    NUMBER_BYTES,
    Reads,
    copy,
    counted,
    cut,
    dropout,
    last_dim,
    norm,
    pointwise,
    residual,
    take,
    view,
)
from meshwright.simulator.graph.tape import Phase, Step, Tape
from meshwright.simulator.graph.tensors import (
    PARTIAL,
    Dim,
    Mesh,
    Placement,
    Size,
    Tensor,
    larger,
    rounded_up,
    share,
)

__all__ = [
    "NUMBER_BYTES",
    "PARTIAL",
    "Backward",
    "Block",
    "Dim",
    "EightBits",
    "FusedAttention",
    "Gradient",
    "Heads",
    "Kind",
    "Linear",
    "Loss",
    "Lowering",
    "Memory",
    "Mesh",
    "Operator",
    "Phase",
    "Placement",
    "Product",
    "Reads",
    "Repetition",
    "Size",
    "Step",
    "Tape",
    "Tensor",
    "Traffic",
    "Transfer",
    "WeightGradients",
    "columns",
    "copy",
    "counted",
    "cut",
    "dropout",
    "flash",
    "larger",
    "last_dim",
    "norm",
    "place",
    "pointwise",
    "product",
    "residual",
    "rounded_up",
    "row",
    "scored",
    "share",
    "take",
    "view",
    "whole_product",
]
