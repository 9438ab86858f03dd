"""Memory of what autocast casts, of gradients that wait or are cast, of repeated inputs."""

from dataclasses import replace

import pytest

from meshwright.hwprofiles import Attention, Precision, Recompute, load_cluster, load_stack
from meshwright.simulator import ModelSpec, ParallelPlan, TrainingJob
from meshwright.simulator.blocks.shape import BlockShape
from meshwright.simulator.costs import CostModel
from meshwright.simulator.layout import Stage
from meshwright.simulator.liveness.activations import (
    cached_layer_bytes,
    saved_head_bytes,
    saved_layer_bytes,
    saved_tensors,
)
from meshwright.simulator.liveness.layer import layer_workspace_bytes
from meshwright.simulator.liveness.products import (
    Product,
    cast_column_steps,
    cast_row_steps,
    highest,
)
from meshwright.simulator.memory import block_bytes, pass_workspace_bytes, virtual_stage_memory
from meshwright.simulator.model import BlockRun
from meshwright.simulator.replication.buckets import gradient_buckets
from meshwright.simulator.step.build import build_step

DDP = load_stack("ddp")
GPT = ModelSpec(
    name="gpt", num_layers=3, hidden_size=512, num_heads=8, vocab_size=4096, seq_len=256
)
UNTIED = GPT.model_copy(update={"tied_embeddings": False, "dropout": False, "positions": "rotary"})
MATRIX = 4096 * 512  # elements of a table
LAYER = 12 * 512**2  # and of a layer's four matrices


def shape_of(
    stack: str = "ddp",
    model: ModelSpec = GPT,
    *,
    precision: Precision = Precision.BF16,
    tokens: int = 256,
    **fields: object,
) -> BlockShape:
    job = TrainingJob(model=model, global_batch_size=1, seq_len=tokens, precision=precision)
    plan = replace(ParallelPlan(stages=(3,), attention=Attention.FLASH), **fields)  # type: ignore[arg-type]
    return BlockShape.of(job, plan, load_stack(stack))


def test_autocast_holds_the_casts_of_recomputed_layers_until_the_loss() -> None:
    full, none = (shape_of(recompute=mode) for mode in (Recompute.FULL, Recompute.NONE))
    assert cached_layer_bytes(full) == 2 * LAYER
    # Else backward holds them anyway; in fp32 there are none; replicas' weights are no leaves.
    assert cached_layer_bytes(none) == 0
    assert cached_layer_bytes(shape_of(precision=Precision.FP32, recompute=Recompute.FULL)) == 0
    module = shape_of(
        "dataparallel",
        precision=Precision.FP16,
        recompute=Recompute.FULL,
        attention=Attention.UNFUSED,
    )
    assert cached_layer_bytes(module) == 0

    def forward(num_layers: int, *, has_head: bool = True) -> int:
        layers = (BlockRun("layer", num_layers),) if num_layers else ()
        stage = Stage(layers, has_embedding=True, has_head=has_head)
        return pass_workspace_bytes(block_bytes(full), stage, max)[0]

    assert [forward(n) - forward(0) for n in range(4)] == [n * 2 * LAYER for n in range(4)]
    # Without a head the last layer's pass is the fullest: the casts of those before it are there.
    headless = [forward(n, has_head=False) for n in range(1, 4)]
    assert headless[0] == layer_workspace_bytes(full)[0]
    assert [each - headless[0] for each in headless] == [n * 2 * LAYER for n in range(3)]
    # 16-bit and fp32 logits beside what is kept of them.
    assert forward(0) == 256 * 4096 * (2 + 4)


def test_a_tied_tables_gradient_waits_for_that_of_the_embedding() -> None:
    """Where the product adds to the kept gradient itself there is the embedding's alone."""
    whole = Stage((BlockRun("layer", 3),), has_embedding=True, has_head=True)
    for stack, precision, size in (
        ("ddp", Precision.FP32, 4),
        ("megatron-lm-2021", Precision.FP16, 2),
    ):
        shape = shape_of(stack, precision=precision, tokens=1, attention=Attention.UNFUSED)
        virtual_stage = virtual_stage_memory(shape, whole, block_bytes(shape))
        needed = virtual_stage.saved_bytes + virtual_stage.backward_workspace_bytes
        assert needed == pytest.approx(2 * MATRIX * size, rel=0.01)
    shape = shape_of("megatron-core", tokens=1)
    virtual_stage = virtual_stage_memory(shape, whole, block_bytes(shape))
    assert virtual_stage.saved_bytes + virtual_stage.backward_workspace_bytes == pytest.approx(
        2 * MATRIX, rel=0.05
    )


def test_a_16_bit_weight_gradient_meets_its_fp32_one_but_not_its_operands() -> None:
    shape = shape_of()
    product = Product("mlp out", 100, 2048, (512,))
    weight = 2048 * 512
    narrow, wide = cast_row_steps(shape, product, inputs_bytes=7, freed=50, stays=False)
    assert narrow[1:] == (7 + 2 * weight, 100 + 50, None)
    assert wide[1:] == (4 * weight, 6 * weight, 4 * weight)
    # Three products of one input: of the inputs' gradients one is left, in fp32.
    qkv = Product("qkv", 2 * 256 * 1536, 512, (512, 512, 512))
    steps = cast_column_steps(shape, qkv, 256, stays=False)
    kept = 3 * (2 * 256 * 512 + 2 * 512**2)  # a copy of input and weight each
    assert (
        sum(step.allocates - step.frees for step in steps) == 4 * 256 * 512 - 2 * 256 * 1536 - kept
    )
    # Of the first: once its 16-bit gradients and copies have gone, its inputs' and its weight's.
    assert highest(steps) == 2 * 512**2 + 4 * 512**2 + 4 * 256 * 512 - (
        2 * 2 * 256 * 512 + 2 * 512**2
    )


@pytest.mark.parametrize("stack", ["ddp", "megatron-core"])
def test_unfused_attention_keeps_keys_and_values_for_each_head(stack: str) -> None:
    grouped = GPT.model_copy(update={"num_kv_heads": 2, "positions": "rotary"})
    shape = shape_of(stack, grouped, attention=Attention.UNFUSED)
    kept = {tensor.name: tensor.size_bytes for tensor in saved_tensors(shape)}
    width = 2 * 256 * 512
    assert kept["repeated keys and values"] == 2 * width
    assert kept["queries, keys and values"] + kept["rotated queries and keys"] == width
    flash = replace(shape, attention=Attention.FLASH)
    assert "repeated keys and values" not in {tensor.name for tensor in saved_tensors(flash)}
    # Where the core runs again, what goes into it is kept, and not yet repeated.
    again = replace(shape, recompute=Recompute.SELECTIVE)
    assert saved_layer_bytes(shape) - saved_layer_bytes(again) > width


def backward_bytes(job: TrainingJob, reduced: Precision | None) -> int:
    """Return what a backward pass of a DDP rank needs beside what is kept."""
    plan = ParallelPlan(dp=8, stages=(1,), attention=Attention.FLASH, reduce_precision=reduced)
    built = build_step(job, plan, CostModel(load_cluster("dgx-a100"), DDP, 8))
    return built.memory[0].virtual_stages[0].backward_workspace_bytes


def test_a_bucket_is_cast_once_its_gradients_are_there() -> None:
    """The loss is over by then: only where weights outweigh it do casts of buckets count."""
    one = UNTIED.model_copy(update={"num_layers": 1})
    job = TrainingJob(model=one, global_batch_size=8, seq_len=1024, precision=Precision.FP32)
    plain = backward_bytes(job, None)
    assert plain == 2 * 4 * 1024 * 4096  # the loss: its gradient and that of the losses
    assert backward_bytes(job, Precision.BF16) == plain
    few = replace(job, seq_len=4)
    shape = BlockShape.of(few, ParallelPlan(stages=(1,), attention=Attention.FLASH), DDP)
    stage = Stage((BlockRun("layer", 1),), has_embedding=True, has_head=True)
    # The output matrix's gradient beside that of its input.
    inputs = 4 * 4 * 512
    assert backward_bytes(few, None) == 4 * MATRIX + inputs
    # The table's gradient beside a copy of the last bucket, once all else has gone.
    last = gradient_buckets(shape, stage)[-1].num_parameters
    assert last > MATRIX
    gone = saved_layer_bytes(shape) + saved_head_bytes(shape)
    assert backward_bytes(few, Precision.BF16) == 4 * MATRIX + 2 * last + inputs - gone
