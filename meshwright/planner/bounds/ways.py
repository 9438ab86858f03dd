"""Critical-path segments of microbatches and gradients through pipelines, as block counts."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.space import Column, Pipeline, Role

Counts = NDArray[np.int64]


class PathSegments(NamedTuple):
    """Blocks of each kind on the way to and from the last rank of roles, one row for each role.

    Those whose names begin with ``sent`` count the blocks whose output or gradient is a message.

    Args:
        own: Blocks of all the rank's virtual stages.
        first: Blocks of the first of them.
        last: Blocks of the last one.
        longest: Blocks of each different stage, some repeated: ``[roles, stages, kinds]``.
        ahead: Blocks ahead of the first one.
        to_last: Blocks ahead of the last one.
        behind: Blocks behind the last one.
        whole: Blocks of the whole pipeline.
        sent_ahead: Messages on the way to the first stage.
        sent_to_last: Messages on the way to the last one.
        sent_behind: Messages from the last one to the end of the pipeline.
        sent_whole: Messages through the whole pipeline.
        sent_forward: Messages that the rank sends in a microbatch's forward passes.
        sent_backward: Messages that it sends in its backward passes.
        sent_last: Message that it sends in the last of these.
        is_end: Whether the role is at an end of the pipeline.
        is_interleaved: Whether its ranks hold several stages.
    """

    own: Counts
    first: Counts
    last: Counts
    longest: Counts
    ahead: Counts
    to_last: Counts
    behind: Counts
    whole: Counts
    sent_ahead: Counts
    sent_to_last: Counts
    sent_behind: Counts
    sent_whole: Counts
    sent_forward: Counts
    sent_backward: Counts
    sent_last: Counts
    is_end: Counts
    is_interleaved: Counts

    def of(self, rows: Column) -> "PathSegments":
        """Return *rows*, which may repeat."""
        return PathSegments(*(each[rows] for each in self))


class SegmentTable(NamedTuple):
    """Segments of every role of some pipelines, and the first row of each pipeline."""

    pipelines: Sequence[Pipeline]
    segments: PathSegments
    starts: Column
    num_roles: Column

    @classmethod
    def of(cls, pipelines: Sequence[Pipeline]) -> "SegmentTable":
        """Return the segments of *pipelines*."""
        # Roles have few different stages: rows are padded to the most by repetition.
        most = max((len(set(role.stages)) for each in pipelines for role in each.roles), default=1)
        rows = [_role_row(each, role, most) for each in pipelines for role in each.roles]
        num_roles = np.array([len(each.roles) for each in pipelines], np.int64)
        columns = list(zip(*rows, strict=True)) or [()] * len(PathSegments._fields)
        segments = PathSegments(*(np.array(each) for each in columns))
        return cls(pipelines, segments, np.cumsum(num_roles) - num_roles, num_roles)


def _role_row(pipeline: Pipeline, role: Role, num_longest: int) -> tuple[object, ...]:
    """Return the row of `PathSegments` of a role."""
    own, stages = pipeline.own_blocks(role), list(dict.fromkeys(role.stages))
    senders, places, last = pipeline.senders, pipeline.places(role), pipeline.last
    distinct = own[[role.stages.index(stage) for stage in stages]]
    return (
        own.sum(axis=0),
        own[0],
        own[-1],
        np.resize(distinct, (num_longest, distinct.shape[1])),
        pipeline.between(0, role.last),
        pipeline.between(0, places[-1]),
        pipeline.between(places[-1] + 1, last + 1),
        pipeline.between(0, last + 1),
        senders[: role.last].sum(axis=0),
        senders[: places[-1]].sum(axis=0),
        senders[places[-1] : last].sum(axis=0),
        senders[:last].sum(axis=0),
        senders[[place for place in places if place < last]].sum(axis=0),
        senders[[place - 1 for place in places if place > 0]].sum(axis=0),
        senders[max(role.last - 1, 0) : role.last].sum(axis=0),
        role.first == 0 or role.last == pipeline.pp - 1,
        len(role.stages) > 1,
    )
