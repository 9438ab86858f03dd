"""One rank counted operator by operator: by hand, with real tensors, and in a fake cluster."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as functional  # noqa: E402
import torch.nn.functional as F  # noqa: E402, N812
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils import flop_counter  # noqa: E402

from meshwright.simulator import TrainingJob, load_model  # noqa: E402
from meshwright.validate.counting.fake_cluster import fake_cluster  # noqa: E402
from meshwright.validate.counting.oracle import RankOracle, StorageGroup  # noqa: E402
from meshwright.validate.programs.contract import Routing  # noqa: E402
from meshwright.validate.ranks.measurement import ByteKind, CollectiveCount  # noqa: E402
from meshwright.validate.runs.measure import _count, _Steps  # noqa: E402

WORLD = {(0, 1, 2, 3): "world"}
WIDTH = 8
WEIGHTS = WIDTH * WIDTH + WIDTH  # of one linear layer
FP32 = 4


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def mark_model(oracle: RankOracle, parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        oracle.mark(parameter, ByteKind.PARAMETERS)
        parameter.register_post_accumulate_grad_hook(
            lambda owner: (
                None if owner.grad is None else oracle.mark(owner.grad, ByteKind.GRADIENTS)
            )
        )


def shown(oracle: RankOracle) -> tuple[object, ...]:
    return (
        oracle.live_bytes,
        oracle.peak_bytes,
        oracle.bytes_at_peak,
        oracle.largest_at_peak(100),
        oracle.flops_by_operator,
        oracle.collectives,
    )


def steps_of_a_block() -> Iterator[tuple[object, ...]]:
    model = Block(32, heads=4)
    oracle = RankOracle({})
    mark_model(oracle, model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with oracle:
        for _ in range(2):
            oracle.start_step()
            model(torch.ones(2, 16, 32)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            for states in optimizer.state.values():
                for state in states.values():
                    oracle.mark(state, ByteKind.OPTIMIZER)
            yield shown(oracle)


def test_fake_tensors_count_as_real_ones() -> None:
    real = list(steps_of_a_block())
    with fake_cluster(0, 1):
        fake = list(steps_of_a_block())
    assert fake == real
    live, _, kinds, _, flops, _ = real[1]
    parameters = (32 * 96 + 96) + (32 * 32 + 32) + (32 * 128 + 128) + (128 * 32 + 32)
    steps = 8  # a scalar a parameter
    assert kinds[ByteKind.PARAMETERS] == parameters * FP32
    assert kinds[ByteKind.OPTIMIZER] == (2 * parameters + steps) * FP32
    assert live == (3 * parameters + steps) * FP32
    square = 2 * 2 * 16 * 16 * 32  # batch x length^2 x width, 2 a multiply-add
    attention = {name: n for name, n in flops.items() if "attention" in name}
    assert sorted(attention.values()) == [2 * square, 5 * square]


def test_a_linear_layer_by_hand() -> None:
    layer = nn.Linear(3, 5)
    oracle = RankOracle({})
    mark_model(oracle, layer.parameters())
    with oracle:
        x = torch.ones(7, 3, requires_grad=True)
        assert oracle.live_bytes == FP32 * (3 * 5 + 5 + 7 * 3)
        oracle.start_step()
        assert oracle.peak_bytes == oracle.live_bytes
        y = layer(x)
        assert oracle.live_bytes == FP32 * (20 + 21 + 35)
        assert oracle.flops == 2 * 7 * 3 * 5
        y.backward(torch.ones(7, 5))
        assert oracle.flops == 3 * 2 * 7 * 3 * 5
        assert oracle.live_bytes == FP32 * (20 + 20 + 21 + 21 + 35)
        assert oracle.bytes_at_peak[ByteKind.PARAMETERS] == FP32 * 20
        assert sum(oracle.bytes_at_peak.values()) == oracle.peak_bytes
        largest = StorageGroup(ByteKind.ACTIVATIONS, FP32 * 35, 1, "aten.addmm.default (7, 5)")
        assert largest in oracle.largest_at_peak(3)
        peak = oracle.peak_bytes
        del y, x
        layer.zero_grad()
        assert oracle.live_bytes == FP32 * 20
        assert oracle.peak_bytes == peak
        oracle.start_step()
        assert (oracle.peak_bytes, oracle.flops) == (FP32 * 20, 0)


def test_storages_that_are_resized_and_viewed() -> None:
    oracle = RankOracle({})
    with oracle:
        tensor = torch.ones(8)
        view = tensor.view(2, 4)[1]
        assert oracle.live_bytes == 32
        tensor.untyped_storage().resize_(0)
        assert oracle.live_bytes == 0
        tensor.untyped_storage().resize_(64)
        assert (oracle.live_bytes, oracle.peak_bytes) == (64, 64)
        del tensor
        assert oracle.live_bytes == 64
        del view
        assert oracle.live_bytes == 0


def test_a_label_reaches_back_to_the_peak_but_not_to_what_came_later() -> None:
    oracle = RankOracle({})
    with oracle:
        first, temporary = torch.ones(4), torch.ones(4)
        del temporary
        second = torch.ones(2)
        oracle.mark(first, ByteKind.OPTIMIZER)
        oracle.mark(second, ByteKind.GRADIENTS)
        assert oracle.peak_bytes == 32
        assert oracle.bytes_at_peak == {
            ByteKind.PARAMETERS: 0,
            ByteKind.GRADIENTS: 0,
            ByteKind.OPTIMIZER: 16,
            ByteKind.ACTIVATIONS: 16,
        }


def test_autograd_adds_gradients_up_in_place_though_a_mode_looks_on() -> None:
    """Without the oracle it does so; under any dispatch mode it makes a third tensor."""
    size = 1 << 20

    def peak(*, of_sum: bool) -> int:
        weight = torch.ones(size, requires_grad=True)
        oracle = RankOracle({})
        oracle.mark(weight, ByteKind.PARAMETERS)
        with oracle:
            used = weight * 2.0
            if of_sum:  # of one tensor, whose two gradients meet
                used = used + weight * 3.0
            used.backward(torch.ones(size))
            weight.grad = None
        return oracle.peak_bytes

    # Weight, its product, the gradient given and that of the weight; forward sums are not in place.
    assert peak(of_sum=False) == 4 * 4 * size
    assert peak(of_sum=True) == 5 * 4 * size


def test_an_operator_with_a_formula_of_its_own_counts() -> None:
    @torch.library.custom_op("meshwright_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @flop_counter.register_flop_formula(torch.ops.meshwright_test.twice)
    def twice_flops(shape: tuple[int, ...], **_: object) -> int:
        return shape[0]

    oracle = RankOracle({})
    with oracle:
        twice(torch.ones(11))
    assert oracle.flops_by_operator == {"meshwright_test.twice.default": 11}


AXES = {
    tuple(range(1024, 1032)): "tp",
    tuple(range(1008, 1056, 8)): "dp",
    tuple(range(16, 3072, 48)): "pp",
}


def run_each_operation(groups: dict[str, dist.ProcessGroup]) -> None:
    """Call every collective and message once or twice, as rank 1024."""
    x = torch.ones(16, 3)
    dist.all_reduce(x, group=groups["dp"])
    dist.all_reduce(x.bfloat16(), group=groups["tp"])
    dist.all_gather_into_tensor(torch.empty(128, 3), x, group=groups["tp"])
    dist.all_gather([torch.empty(16, 3) for _ in range(8)], x, group=groups["tp"])
    dist.reduce_scatter_tensor(torch.empty(2, 3), x, group=groups["tp"])
    dist.broadcast(x, 1024, group=groups["tp"])
    dist.reduce(x, 1024, group=groups["tp"])
    dist.all_to_all_single(torch.empty(16, 3), x, group=groups["tp"])
    functional.wait_tensor(functional.all_reduce(x, "sum", groups["dp"]))
    functional.reduce_scatter_tensor(x, "sum", 0, groups["tp"]).sum()
    functional.all_gather_tensor(x, 0, groups["tp"]).sum()
    functional.all_reduce_coalesced([x, x], "sum", groups["tp"])[0].sum()
    dist.send(x, 1024 - 48, group=groups["pp"])
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x[:2], 1024 + 48, group=groups["pp"]),
            dist.P2POp(dist.irecv, x[:1], 1024 + 48, group=groups["pp"]),
        ]
    )
    for work in works:
        work.wait()
    dist.all_reduce(x)
    dist.barrier(groups["tp"])


@pytest.mark.filterwarnings("ignore:`torch.distributed.* is deprecated:FutureWarning")
def test_each_operation_of_a_rank_of_3072() -> None:
    oracle = RankOracle(AXES)
    with fake_cluster(1024, 3072):
        mesh = init_device_mesh("cpu", (64, 6, 8), mesh_dim_names=("pp", "dp", "tp"))
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        assert list(coordinate) == [21, 2, 0]
        groups = {axis: mesh[axis].get_group() for axis in ("pp", "dp", "tp")}
        assert {tuple(dist.get_process_group_ranks(group)) for group in groups.values()} == set(
            AXES
        )
        assert mesh["tp"].mesh.tolist() == list(range(1024, 1032))
        with oracle:
            run_each_operation(groups)
    row, all_of = 12, 192
    assert oracle.collectives == tuple(
        CollectiveCount(*call)
        for call in (
            ("dp", "all_reduce", 6, all_of, 2),
            ("other", "all_reduce", 3072, all_of, 1),
            ("pp", "recv", 2, row, 1),
            ("pp", "send", 2, 2 * row, 1),
            ("pp", "send", 2, all_of, 1),
            ("tp", "all_gather", 8, 8 * all_of, 3),
            ("tp", "all_reduce", 8, all_of // 2, 1),
            ("tp", "all_reduce", 8, all_of, 2),
            ("tp", "all_to_all", 8, all_of, 1),
            ("tp", "broadcast", 8, all_of, 1),
            ("tp", "reduce", 8, all_of, 1),
            ("tp", "reduce_scatter", 8, all_of, 2),
        )
    )


def test_what_is_one_kernel_on_a_gpu_is_one_on_fake_tensors() -> None:
    tokens, width = 6, 8
    with fake_cluster(0, 1):
        values = torch.ones(tokens, width, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.ones(width, dtype=torch.bfloat16, requires_grad=True)
        with RankOracle({}) as oracle:
            normed = F.rms_norm(values, (width,), weight)
            # In the values' width, and a number a token in fp32.
            assert oracle.live_bytes == normed.nbytes + tokens * 4
            dropped = F.dropout(normed, 0.1)
            assert oracle.live_bytes == 3 * normed.nbytes // 2 + tokens * 4 + dropped.nbytes
            dropped.sum().backward()
    # With data both run as they always do on a CPU.
    values = torch.ones(tokens, width)
    assert F.rms_norm(values, (width,)).allclose(values)
    assert F.dropout(values, 0.0).equal(values)


def test_a_group_of_one_and_waiting_cost_nothing() -> None:
    oracle = RankOracle({})
    with fake_cluster(2, 4):
        alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("many", "one"))["one"].get_group()
        with oracle:
            x = torch.ones(4)
            before = oracle.peak_bytes
            y = functional.all_reduce(x, "sum", alone)
            made = oracle.peak_bytes
            functional.wait_tensor(y)
            assert (before, made, oracle.peak_bytes) == (16, 32, 32)
    assert oracle.collectives == ()


def test_data_parallel_all_reduces_its_buckets() -> None:
    oracle = RankOracle(WORLD)
    with fake_cluster(1, 4), oracle:
        model = DistributedDataParallel(two_layers())
        counts = []
        for _ in range(3):
            oracle.start_step()
            model(torch.ones(2, WIDTH)).sum().backward()
            counts.append(oracle.collectives)
    gradients = CollectiveCount("world", "all_reduce", 4, 2 * WEIGHTS * FP32, 1)
    assert counts[0] == counts[2] == (gradients,)
    # Once, before the second step, the ranks agree on the order of 4 parameters in 1 bucket.
    assert counts[1] == (
        gradients,
        CollectiveCount("world", "broadcast", 4, FP32, 1),
        CollectiveCount("world", "broadcast", 4, 5 * FP32, 1),
    )


def test_fully_sharded_gathers_twice_and_scatters_once() -> None:
    oracle = RankOracle(WORLD)
    with fake_cluster(1, 4):
        mesh = init_device_mesh("cpu", (4,))
        model = two_layers()
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        mark_model(oracle, model.parameters())
        with oracle:
            for _ in range(2):
                oracle.start_step()
                assert oracle.bytes_at_peak[ByteKind.PARAMETERS] == 2 * WEIGHTS * FP32 // 4
                model(torch.ones(2, WIDTH)).sum().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                assert oracle.collectives == (
                    CollectiveCount("world", "all_gather", 4, WEIGHTS * FP32, 4),
                    CollectiveCount("world", "all_reduce", 4, 4 * FP32, 1),  # a norm a parameter
                    CollectiveCount("world", "reduce_scatter", 4, WEIGHTS * FP32, 2),
                )
                assert oracle.flops == 5 * 2 * 2 * WIDTH * WIDTH


def test_tensor_parallel_counts_only_its_own_share() -> None:
    oracle = RankOracle(WORLD)
    with fake_cluster(3, 4):
        mesh = init_device_mesh("cpu", (4,))
        model = parallelize_module(
            two_layers(), mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()}
        )
        for _ in range(2):
            with oracle:
                oracle.start_step()
                x = torch.ones(2, WIDTH, requires_grad=True)
                model(x).sum().backward()
            assert oracle.flops == 6 * 2 * 2 * WIDTH * WIDTH // 4  # in the first step, too
            assert oracle.collectives == (
                CollectiveCount("world", "all_reduce", 4, 2 * WIDTH * FP32, 2),
            )


def test_a_middle_stage_sends_and_receives_each_microbatch_both_ways() -> None:
    oracle = RankOracle(WORLD)
    with fake_cluster(1, 4):
        x = torch.ones(3, WIDTH, requires_grad=True)
        stage = PipelineStage(
            nn.Linear(WIDTH, WIDTH), 1, 4, torch.device("cpu"), input_args=(x,), output_args=(x,)
        )
        schedule = Schedule1F1B(stage, 8, loss_fn=lambda y, target: (y - target).sum())
        with oracle:
            for _ in range(3):  # to 2.11 the first step begins with messages of one number
                oracle.start_step()
                schedule.step()
                assert oracle.flops == 8 * 3 * 2 * 3 * WIDTH * WIDTH
        assert oracle.collectives == tuple(
            CollectiveCount("world", op, 2, 3 * WIDTH * FP32, 2 * 8) for op in ("recv", "send")
        )


def test_a_stage_must_know_its_shapes() -> None:
    with fake_cluster(1, 4):
        stage = PipelineStage(nn.Linear(WIDTH, WIDTH), 1, 4, torch.device("cpu"))
        # To 2.11 PyTorch asks the stage before, and reads numbers that are not there.
        with pytest.raises((ValueError, RuntimeError), match=r"input_args|_local_scalar_dense"):
            Schedule1F1B(stage, 8, loss_fn=lambda y, target: (y - target).sum()).step()


def test_after_an_exception_all_is_as_before() -> None:
    before = {
        "mesh": dict(vars(DeviceMesh)),
        "resize": torch.UntypedStorage.resize_,
        "rebuild": torch._C._distributed_c10d.Reducer._rebuild_buckets,
    }

    def fail() -> None:
        with fake_cluster(0, 2), RankOracle({}):
            torch.ones(1).item()

    for _ in range(2):
        with pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):
            fail()
        assert not dist.is_initialized()
        assert torch.ones(2).sum().item() == 2
        assert before == {
            "mesh": dict(vars(DeviceMesh)),
            "resize": torch.UntypedStorage.resize_,
            "rebuild": torch._C._distributed_c10d.Reducer._rebuild_buckets,
        }


def test_a_fake_cluster_does_not_nest_and_has_only_its_ranks() -> None:
    with fake_cluster(0, 2):
        with pytest.raises(RuntimeError, match="process group"), fake_cluster(0, 2):
            pass
        assert dist.get_world_size() == 2
    with pytest.raises(ValueError, match="rank=2 of world_size=2"), fake_cluster(2, 2):
        pass


@pytest.mark.parametrize("outer", [nullcontext(), fake_cluster(0, 2)], ids=["real", "fake"])
def test_oracles_nest_and_can_be_entered_again(outer: AbstractContextManager[None]) -> None:
    with outer:
        first, second = RankOracle({}), RankOracle({})
        with first:
            a = torch.ones(4)
            with second:
                b = torch.ones(2)
                b.untyped_storage().resize_(64)
        with first:
            c = torch.ones(1)
        assert (first.live_bytes, second.live_bytes) == (16 + 64 + 4, 64)
        del a, b, c
        assert (first.live_bytes, second.live_bytes) == (0, 0)


def test_a_mesh_of_unknown_ranks_is_refused() -> None:
    with fake_cluster(0, 4):
        assert DeviceMesh("cpu", [[0, 2], [1, 3]]).size() == 4
        with pytest.raises(ValueError, match="as a list"):
            DeviceMesh("cpu", torch.arange(4).view(2, 2))


def test_what_steps_before_those_that_are_counted_left_counts() -> None:
    """FSDP gives tensors of gathered weights back between uses, and takes them again."""

    class Gathering:
        groups: ClassVar[dict[tuple[int, ...], str]] = {}

        def __init__(self) -> None:
            self.kept: list[torch.Tensor] = []

        def persistent_tensors(self) -> Iterable[tuple[torch.Tensor, ByteKind]]:
            return ()

        def run_step(self, step: int) -> list[torch.Tensor]:
            if not self.kept:
                self.kept.append(torch.empty(WIDTH))
            storage = self.kept[0].untyped_storage()
            storage.resize_(FP32 * WIDTH)
            storage.resize_(0)
            return []

    job = TrainingJob(model=load_model("mixtral-8x7b"), global_batch_size=1, seq_len=8)
    request = SimpleNamespace(job=job, routing=Routing())
    counts = _count(_Steps(Gathering(), torch.device("cpu")), request)  # type: ignore[arg-type]
    assert counts.peak_bytes == FP32 * WIDTH
    assert request.routing.is_balanced
