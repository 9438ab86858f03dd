"""Static inputs of CUDA graphs as Megatron-Core makes and reuses them, against what is counted."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn
from witnesses import megatron_job

from meshwright.hwprofiles import CudaGraphs, load_stack
from meshwright.simulator import ResolvedPlan, TrainingJob, load_model
from meshwright.simulator.blocks import BlockShape, BlockTable
from meshwright.simulator.memory import block_bytes
from meshwright.simulator.model import TRANSFORMER_LAYER
from meshwright.simulator.schedules import Phase, get_schedule

from megatron.core.transformer import cuda_graphs  # isort: skip  (after what stands for Apex)
from megatron.core.transformer.transformer_layer import TransformerLayer  # isort: skip

MODEL = load_model("llama3-8b")


def graphable_layer(**config: object) -> TransformerLayer:
    """Return a layer without weights, which knows its sizes."""
    layer = TransformerLayer.__new__(TransformerLayer)
    nn.Module.__init__(layer)
    layer.config = SimpleNamespace(cuda_graph_scope=[], hidden_size=MODEL.hidden_size, **config)
    layer.self_attention = nn.Module()
    return layer


@pytest.mark.parametrize(("tp", "cp", "microbatch_size"), [(1, 1, 1), (2, 1, 3), (4, 2, 1)])
def test_a_layer_has_the_static_inputs_that_it_makes(
    tp: int, cp: int, microbatch_size: int
) -> None:
    assert megatron_job
    layer = graphable_layer(
        context_parallel_size=cp, tensor_model_parallel_size=tp, sequence_parallel=tp > 1
    )
    with patch("torch.cuda.current_device", lambda: torch.device("cpu")):
        made = layer.get_layer_static_inputs(256, microbatch_size)
    job = TrainingJob(model=MODEL, global_batch_size=microbatch_size, seq_len=256)
    plan = ResolvedPlan(
        tp=tp,
        cp=cp,
        cp_type="ring" if cp > 1 else None,
        microbatch_size=microbatch_size,
        sequence_parallel=tp > 1,
        stages=(32,),
    )
    stack = load_stack("megatron-core")
    saved = []
    for graphs in CudaGraphs.NONE, CudaGraphs.LAYERS:
        shape = BlockShape.of(job, plan, stack.model_copy(update={"cuda_graphs": graphs}))
        saved.append(block_bytes(BlockTable(), shape)[TRANSFORMER_LAYER].saved)
    # Its input is kept anyway; as much more is its output, which is a tensor of its own.
    assert saved[1] - saved[0] == sum(each.nbytes for each in made.values())


@pytest.mark.parametrize(("pp", "rank", "count"), [(4, 0, 8), (4, 3, 8), (2, 0, 2), (4, 1, 3)])
def test_static_inputs_are_as_many_as_microbatches_are_in_flight(
    pp: int, rank: int, count: int
) -> None:
    num_layers, schedule = 3, get_schedule("1f1b")
    made: list[torch.Tensor] = []

    class Layer(nn.Module):
        def get_layer_static_inputs(self, _length: int, _size: int) -> dict[str, torch.Tensor]:
            made.append(torch.empty(4))
            return {"hidden_states": made[-1], "attention_mask": torch.empty(2)}

    layers = [Layer() for _ in range(num_layers)]
    helper = cuda_graphs.TECudaGraphHelper.__new__(cuda_graphs.TECudaGraphHelper)
    helper.config = SimpleNamespace(cuda_graph_scope=[], multi_latent_attention=False)
    helper.num_model_chunks, helper.num_microbatches = 1, count
    helper.flattened_callables, helper.callables_per_chunk = layers, [layers]
    helper.num_layers_per_chunk = [num_layers]
    helper.seq_length, helper.micro_batch_size = 4, 1
    helper.chunks_with_decoder = [SimpleNamespace(decoder=SimpleNamespace(layers=layers))]
    actions = schedule.rank_actions(rank, pp, count, 1)
    order = [1 if each.phase is Phase.FORWARD else -1 for each in actions]
    with patch.object(cuda_graphs, "is_te_min_version", lambda _: True):
        inputs, _ = helper._get_sample_arguments(order)
    assert len(inputs) == num_layers * count
    distinct = {each[0].data_ptr() for each in inputs}
    in_flight = schedule.in_flight(rank, pp, count, 1)
    assert len(distinct) == num_layers * in_flight
