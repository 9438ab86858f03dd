"""Stand-ins for gradients that products add to their sums.

Where a product adds a weight's gradient to the sum that a rank keeps, autograd still asks for a
gradient of that weight, and is given a tensor of its shape that nobody reads.  There is one for all
weights of a shape, in their format, and it is never let go.
"""

from collections.abc import Iterable
from math import prod

from meshwright.hwprofiles import Kernels
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.model import BlockRun, linear_shapes


def stand_in_bytes(shape: BlockShape, blocks: Iterable[BlockRun]) -> int:
    """Return what the stand-ins of a rank's *blocks* hold, 0 where its stack keeps none.

    They are Transformer Engine's (get_dummy_wgrad of pytorch/module/base.py: of linear layers from
    2.3 on, of experts from 2.10); Megatron-Core's output matrix has them from core 0.14 on
    (tensor_parallel/layers.py).
    """
    stack = shape.stack
    adds = stack.fused_gradient_accumulation and stack.kernels is not Kernels.EAGER
    if not (stack.keeps_stand_ins and adds):
        return 0
    multiple = stack.vocabulary_multiple
    known = linear_shapes(shape.trained, multiple, shape.tp, shape.ep, shape.etp)
    found = {size for kind, _ in blocks for size in known.get(kind, ())}
    return shape.element_bytes * sum(prod(size) for size in found)
