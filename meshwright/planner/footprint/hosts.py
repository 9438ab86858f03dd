"""Which layouts the hosts have room for, of those that keep states there."""

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import Cluster
from meshwright.planner.space import ACTIVATIONS, Column, ShapeTable, Space, distinct
from meshwright.simulator.blocks import BlockTable
from meshwright.simulator.layout import Axis, Mesh
from meshwright.simulator.memory import StateBytes, block_bytes
from meshwright.simulator.replication import replication_of
from meshwright.simulator.step import activation_host_bytes, node_host_bytes, rank_host_bytes

# Of a layout's fields, with its pipeline, what its hosts hold follows from these.
NAMES = (
    *(axis.value for axis in Axis),
    "dp_shard",
    "zero_stage",
    "offload",
    "gradient_precision",
    "moment_precision",
    "sync_each_microbatch",
)


def host_bytes_column(
    space: Space,
    table: ShapeTable,
    cluster: Cluster,
    blocks: BlockTable,
    indices: NDArray[np.int64],
) -> Column:
    """Return what the fullest node keeps on its host, of each layout; 0 of all but *indices*."""
    found = np.zeros(len(space), np.int64)
    asked = [space.column(name)[indices] > 0 for name in ("offload", *ACTIVATIONS)]
    indices = indices[np.any(asked, axis=0)]
    if not len(indices):
        return found
    several = np.asarray(space.num_microbatches[indices] > 1, np.int64)
    columns = [*(space.column(name)[indices] for name in NAMES), table.index[indices]]
    first, member = distinct([*columns, space.pipeline_numbers[indices], several])
    known = space, table, cluster, blocks
    each = [_node_bytes(*known, index) for index in indices[first].tolist()]
    found[indices] = np.array(each, np.int64)[member]
    return found


def _node_bytes(
    space: Space, table: ShapeTable, cluster: Cluster, blocks: BlockTable, index: int
) -> int:
    """Return what the fullest node of layout *index* keeps on its host."""
    (plan,), stack = space.plans_without_stages([index]), space.stack
    mesh, shape = Mesh.of(plan, cluster.devices_per_node), table.shapes[table.index[index]]
    formats = plan.gradient_formats, plan.moment_precision
    state = StateBytes.of(stack, space.job.precision, *formats)
    replication = replication_of(plan, stack, mesh)
    stages = space.pipelines[space.pipeline_numbers[index]].stages
    count = plan.num_microbatches(space.job)
    known = block_bytes(blocks, shape, others=space.kinds)
    of_ranks = [
        rank_host_bytes(shape, own, state, replication, count) + activation_host_bytes(known, own)
        for own in (stages[pp_rank :: plan.pp] for pp_rank in range(plan.pp))
    ]
    return node_host_bytes(mesh, of_ranks)
