"""Host memory of layouts that offload states or activations."""

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import Cluster
from meshwright.planner.space import ACTIVATIONS, Column, ShapeTable, Space, distinct
from meshwright.simulator.blocks import BlockTable
from meshwright.simulator.layout import Axis, Mesh
from meshwright.simulator.memory import StateBytes, block_bytes
from meshwright.simulator.replication import replication_of
from meshwright.simulator.step import activation_host_bytes, node_host_bytes, rank_host_bytes

# Fields of a layout from which, with its pipeline, its host memory follows.
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
    """Return the host bytes of the fullest node of each layout; 0 of all but *indices*."""
    host_bytes = np.zeros(len(space), np.int64)
    offloads = [space.column(name)[indices] > 0 for name in ("offload", *ACTIVATIONS)]
    indices = indices[np.any(offloads, axis=0)]
    if not len(indices):
        return host_bytes
    # A single microbatch has no earlier gradient on the host to be added to.
    accumulates = np.asarray(space.num_microbatches[indices] > 1, np.int64)
    columns = [*(space.column(name)[indices] for name in NAMES), table.index[indices]]
    first, member = distinct([*columns, space.pipeline_numbers[indices], accumulates])
    common = space, table, cluster, blocks
    each = [_node_bytes(*common, index) for index in indices[first].tolist()]
    host_bytes[indices] = np.array(each, np.int64)[member]
    return host_bytes


def _node_bytes(
    space: Space, table: ShapeTable, cluster: Cluster, blocks: BlockTable, index: int
) -> int:
    """Return the host bytes of the fullest node of layout *index*."""
    (plan,), stack = space.plans_without_stages([index]), space.stack
    mesh, shape = Mesh.of(plan, cluster.devices_per_node), table.shapes[table.index[index]]
    formats = plan.gradient_formats, plan.moment_precision
    state = StateBytes.of(stack, space.job.precision, *formats)
    replication = replication_of(plan, stack, mesh)
    stages = space.pipelines[space.pipeline_numbers[index]].stages
    count = plan.num_microbatches(space.job)
    sizes = block_bytes(blocks, shape, others=space.kinds)
    of_ranks = [
        rank_host_bytes(shape, own, state, replication, count) + activation_host_bytes(sizes, own)
        for own in (stages[pp_rank :: plan.pp] for pp_rank in range(plan.pp))
    ]
    return node_host_bytes(mesh, of_ranks)
