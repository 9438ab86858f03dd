"""Which buckets Megatron-FSDP gathers and reduces, and how often, in models of any sizes."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from witnesses import megatron_fsdp, megatron_job
from witnesses.boundary import modules_converted, objects_shared, values_answered

from meshwright.simulator.model import TRANSFORMER_LAYER
from meshwright.simulator.replication.flat_units import bucket_size
from meshwright.simulator.replication.unit_walk import EndBuckets, FlatBucket, UnitWalk
from meshwright.validate.counting import RankOracle, fake_cluster

from megatron.core import parallel_state  # isort: skip  (after what stands for Apex)

RANKS, EXPERT_RANKS, WIDTH = 4, 2, 1000
LIMIT = 40_000_000  # elements that fill a bucket of what lies outside all layers
ROWS = 50_000  # of the table and of the head, which fill one each


class Layer(nn.Module):
    """A unit of one weight, and of one more that it says are experts'."""

    def __init__(self, rows: int, expert_rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, WIDTH))
        if expert_rows:
            self.experts = nn.Linear(WIDTH, expert_rows, bias=False)
            self.experts.weight.allreduce = False

    def forward(self, x: Tensor) -> Tensor:
        """Read each weight once."""
        x = x + (x @ self.weight.t()).sum()
        return x + self.experts(x).sum() if hasattr(self, "experts") else x


class Model(nn.Module):
    """Table, layers and head, each of them a module of its own."""

    def __init__(self, layers: list[tuple[int, int]]) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.ModuleList([Layer(*rows) for rows in layers])
        self.head = nn.Linear(WIDTH, ROWS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Go through all."""
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def counted(layers: list[tuple[int, int]]) -> Counter[tuple[str, int]]:
    """Return the calls of a second step of one microbatch, by bytes."""
    found: Counter[tuple[str, int]] = Counter()
    with (
        fake_cluster(0, RANKS),
        values_answered(),
        modules_converted(),
        objects_shared(),
        megatron_job.answers(),
    ):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=RANKS // EXPERT_RANKS, create_gloo_process_groups=False
        )
        config = SimpleNamespace(
            calculate_per_token_loss=False, init_model_with_meta_device=False, fp8_recipe=None
        )
        wrapped = megatron_fsdp.wrap(config, Model(layers), units=[Layer])
        groups = {tuple(range(RANKS)): "dp", (0, 2): "edp"}
        for _ in range(2):
            oracle = RankOracle(groups)
            with oracle:
                wrapped.zero_grad_buffer()
                wrapped(torch.zeros((1, 1), dtype=torch.long)).sum().backward()
                wrapped.finish_grad_sync()
    for call in oracle.collectives:
        found[call.op, call.size_bytes] += call.num_calls
    return found


def predicted(layers: list[tuple[int, int]]) -> Counter[tuple[str, int]]:
    """Return the same as it is derived."""
    end = bucket_size([(ROWS, WIDTH)], RANKS)
    units = [
        (
            TRANSFORMER_LAYER,
            (
                FlatBucket(bucket_size([(rows, WIDTH)], RANKS)),
                *[
                    FlatBucket(bucket_size([(each, WIDTH)], EXPERT_RANKS), is_expert=True)
                    for each in [expert_rows]
                    if each
                ],
            ),
        )
        for rows, expert_rows in layers
    ]
    mean = sum(map(sum, layers)) * WIDTH // len(layers)
    walk = UnitWalk.of(EndBuckets((end,), (end,), is_shared=False), tuple(units), mean)
    found = Counter({("all_gather", 4 * end): 2, ("reduce_scatter", 4 * end): 2})
    for (_, unit), vain in zip(walk.layers, walk.vain_gathers, strict=True):
        for bucket, more in zip(unit, vain, strict=True):
            found["all_gather", 4 * bucket.size] += 2 + more
            found["reduce_scatter", 4 * bucket.size] += 1
    return found


@pytest.mark.parametrize(
    "layers",
    [
        [(100_000, 0)] * 3,  # all are gathered ahead of each other: none in vain
        [(100_000, 0)] * 9,
        [(200_000, 0)] * 2,
        [(200_000, 0)] * 4,  # the last one, gathered ahead by the head, is freed for another
        [(200_000, 0)] * 5,
        [(300_000, 0)] * 6,
        [(700_000, 0)] * 4,
        [(500_000, 0), (20_000, 0), (300_000, 0), (20_000, 0)],
        [(60_000, 250_000)] * 4,  # half of a unit ahead
        [(60_000, 90_000)] * 7,
        [(30_000, 600_000)] * 3,
    ],
)
def test_megatron_fsdp_gathers_and_reduces_as_derived(layers: list[tuple[int, int]]) -> None:
    assert counted(layers) == predicted(layers)
