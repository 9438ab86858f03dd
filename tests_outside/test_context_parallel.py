"""PyTorch's own ring attention, which torchtitan runs, counted as one rank of a fake cluster."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as pytorch

from meshwright.hwprofiles import ContextParallel, load_stack
from meshwright.simulator import ResolvedPlan, TrainingJob, load_model
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.blocks.kinds import lowering_of
from meshwright.simulator.blocks.operators import RingMessages
from meshwright.simulator.blocks.parts import context_parallel
from meshwright.simulator.graph import (
    Backward,
    Block,
    BlockMemory,
    Dim,
    Exchange,
    Heads,
    Phase,
    Tape,
    WeightGradients,
)
from meshwright.validate.counting import RankOracle, fake_cluster

HEADS, WIDTH, TOKENS = 8, 64, 4096
WIDER = 96  # of keys than values, as heads of latent attention have them
METHODS = {ContextParallel.ALL_GATHER: "allgather", ContextParallel.RING: "alltoall"}
Calls = dict[tuple[str, int], int]


def forward(query: Tensor, key: Tensor, value: Tensor, **said: bool) -> tuple[Tensor, ...]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return tuple(kernel(query, key, value, 0.0, said["is_causal"]))


def backward(**said: Tensor) -> tuple[Tensor, ...]:
    names = ("grad_out", "query", "key", "value", "out", "logsumexp")
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return tuple(kernel(*(said[name] for name in names), 0.0, said["is_causal"]))


def forward_of_cudnn(query: Tensor, key: Tensor, value: Tensor, **said: bool) -> tuple[Tensor, ...]:
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention
    found = kernel(query, key, value, None, compute_log_sumexp=True, is_causal=said["is_causal"])
    return tuple(found[:2])


def backward_of_cudnn(**said: Tensor) -> tuple[Tensor, ...]:
    names = ("grad_out", "query", "key", "value", "out", "logsumexp")
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    given, seed = [said[name] for name in names], torch.empty((), dtype=torch.long)
    tokens = given[1].shape[2], given[2].shape[2]
    return tuple(kernel(*given, seed, seed, None, None, None, *tokens, 0.0, said["is_causal"]))


def shapes_of(cp: int, key_heads: int, width: int) -> list[tuple[int, ...]]:
    """Return the shapes of queries, keys and values."""
    heads = (HEADS, width), (key_heads, width), (key_heads, WIDTH)
    return [(1, number, TOKENS // cp, each) for number, each in heads]


def counted(way: ContextParallel, cp: int, key_heads: int, width: int) -> list[tuple[int, Calls]]:
    """Return peak and calls of the last rank, forward and backward.

    Flash attention knows heads of one width alone, cuDNN's the others; it has a dim more of rows.
    """
    found = []
    shapes = shapes_of(cp, key_heads, width)
    kernels = (forward, backward) if width == WIDTH else (forward_of_cudnn, backward_of_cudnn)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        with fake_cluster(cp - 1, cp), RankOracle({tuple(range(cp)): "cp"}) as oracle:
            pytorch.set_rotate_method(METHODS[way])
            over = dist.group.WORLD, 2
            given = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
            if phase is Phase.FORWARD:
                pytorch._templated_ring_attention(*over, kernels[0], *given, is_causal=True)
            else:
                shape = (*shapes[0][:-1], WIDTH)
                out, gradient = (torch.empty(shape, dtype=torch.bfloat16) for _ in range(2))
                rows = torch.empty((*shape[:-1], 1) if width > WIDTH else shape[:-1])
                ring = pytorch._templated_ring_attention_backward
                ring(*over, kernels[1], gradient, "grad_out", *given, out, rows, is_causal=True)
            calls = {(each.op, each.size_bytes): each.num_calls for each in oracle.collectives}
            found.append((oracle.peak_bytes, calls))
    return found


def predicted(way: ContextParallel, cp: int, key_heads: int, width: int) -> list[tuple[int, Calls]]:
    plan = ResolvedPlan(cp=cp, cp_type=way, zero_stage=3)
    job = TrainingJob(model=load_model("gpt2"), global_batch_size=1, seq_len=1024)
    block = Block({}, lowering_of(BlockShape.of(job, plan, load_stack("torchtitan@0.2"))))
    tokens, batch = Dim("tokens", TOKENS // cp), Dim("batch", 1)
    given = [
        block.tensor(name, tokens, batch, Dim(name, heads * each, each))
        for name, (_, heads, _, each) in zip(
            ("queries", "keys", "values"), shapes_of(cp, key_heads, width), strict=True
        )
    ]
    heads = Heads(Dim("heads", HEADS), tokens, TOKENS, causal=True, drops=False, ranks=cp)
    context_parallel(block, *given, heads, way)
    tape = Tape(block)
    tape.run_forward(*given)
    walk = Backward(tape, WeightGradients.KEPT)
    walk.run()
    memory = BlockMemory.of(walk)
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
@pytest.mark.parametrize(
    ("cp", "key_heads", "width"),
    [(2, 8, WIDTH), (4, 8, WIDTH), (8, 2, WIDTH), (2, 8, WIDER), (4, 8, WIDER)],
)
def test_a_ring_sends_and_holds_what_pytorchs_own_does(
    way: ContextParallel, cp: int, key_heads: int, width: int
) -> None:
    assert predicted(way, cp, key_heads, width) == counted(way, cp, key_heads, width)
