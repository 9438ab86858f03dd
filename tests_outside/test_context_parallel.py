"""PyTorch's own ring attention, which torchtitan runs, counted as one rank of a fake cluster."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as pytorch

from meshwright.hwprofiles import ContextParallel, load_stack
from meshwright.simulator import ParallelPlan, TrainingJob, load_model
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.blocks.kinds import lowering_of
from meshwright.simulator.blocks.operators import RingMessages
from meshwright.simulator.blocks.parts import context_parallel
from meshwright.simulator.graph import (
    Backward,
    Block,
    Dim,
    Exchange,
    Heads,
    Memory,
    Phase,
    Tape,
    WeightGradients,
)
from meshwright.validate.counting import RankOracle, fake_cluster

HEADS, WIDTH, TOKENS = 8, 64, 4096
METHODS = {ContextParallel.ALL_GATHER: "allgather", ContextParallel.RING: "alltoall"}
Calls = dict[tuple[str, int], int]


def forward(query: Tensor, key: Tensor, value: Tensor, **said: bool) -> tuple[Tensor, ...]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return tuple(kernel(query, key, value, 0.0, said["is_causal"]))


def backward(**said: Tensor) -> tuple[Tensor, ...]:
    names = ("grad_out", "query", "key", "value", "out", "logsumexp")
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return tuple(kernel(*(said[name] for name in names), 0.0, said["is_causal"]))


def counted(way: ContextParallel, cp: int, key_heads: int) -> list[tuple[int, Calls]]:
    """Return peak and calls of the last rank, forward and backward."""
    found = []
    shapes = [(1, heads, TOKENS // cp, WIDTH) for heads in (HEADS, key_heads, key_heads)]
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        with fake_cluster(cp - 1, cp), RankOracle({tuple(range(cp)): "cp"}) as oracle:
            pytorch.set_rotate_method(METHODS[way])
            over = dist.group.WORLD, 2
            given = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
            if phase is Phase.FORWARD:
                pytorch._templated_ring_attention(*over, forward, *given, is_causal=True)
            else:
                out, gradient = (torch.empty_like(given[0]) for _ in range(2))
                rows = torch.empty(shapes[0][:-1])
                ring = pytorch._templated_ring_attention_backward
                ring(*over, backward, gradient, "grad_out", *given, out, rows, is_causal=True)
            calls = {(each.op, each.size_bytes): each.num_calls for each in oracle.collectives}
            found.append((oracle.peak_bytes, calls))
    return found


def predicted(way: ContextParallel, cp: int, key_heads: int) -> list[tuple[int, Calls]]:
    plan = ParallelPlan(cp=cp, cp_type=way, zero_stage=3)
    job = TrainingJob(model=load_model("gpt2"), global_batch_size=1, seq_len=1024)
    block = Block({}, lowering_of(BlockShape.of(job, plan, load_stack("torchtitan"))))
    tokens, batch = Dim("tokens", TOKENS // cp), Dim("batch", 1)
    given = [
        block.tensor(name, tokens, batch, Dim(name, heads * WIDTH, WIDTH))
        for name, heads in (("queries", HEADS), ("keys", key_heads), ("values", key_heads))
    ]
    heads = Heads(Dim("heads", HEADS), tokens, TOKENS, causal=True, drops=False, ranks=cp)
    context_parallel(block, *given, heads, way)
    tape = Tape(block)
    tape.run_forward(*given)
    walk = Backward(tape, WeightGradients.KEPT)
    walk.run()
    memory = Memory.of(walk)
    peaks = memory.saved + memory.forward, memory.saved + memory.backward
    calls: list[Calls] = [{}, {}]
    for phase, _, work in tape.steps:
        if isinstance(work, Exchange):
            sent = RingMessages("", work.op, work.nbytes, work.axis, work.steps, work.beside)
            own = calls[phase is Phase.BACKWARD]
            for op, size, count in sent.collectives:
                own[op.value, size] = own.get((op.value, size), 0) + count
    return list(zip(peaks, calls, strict=True))


@pytest.mark.parametrize("way", METHODS)
@pytest.mark.parametrize(("cp", "key_heads"), [(2, 8), (4, 8), (8, 2)])
def test_a_ring_sends_and_holds_what_pytorchs_own_does(
    way: ContextParallel, cp: int, key_heads: int
) -> None:
    assert predicted(way, cp, key_heads) == counted(way, cp, key_heads)
