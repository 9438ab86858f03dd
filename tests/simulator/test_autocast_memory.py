"""Memory of what autocast casts, of gradients that wait or are cast, of repeated inputs."""

from dataclasses import replace

import pytest

from meshwright.hwprofiles import Attention, Precision, Recompute, load_cluster, load_stack
from meshwright.simulator import ModelSpec, ResolvedPlan, TrainingJob
from meshwright.simulator.blocks import BlockShape, BlockTable
from meshwright.simulator.costs import CostModel
from meshwright.simulator.layout import Stage
from meshwright.simulator.memory import block_bytes, pass_workspace_bytes, virtual_stage_memory
from meshwright.simulator.model import BlockRun
from meshwright.simulator.replication.buckets import gradient_buckets
from meshwright.simulator.step.build import build_step

DDP = load_stack("ddp")
TABLE = BlockTable()
GPT = ModelSpec(
    name="gpt", num_layers=3, hidden_size=512, num_heads=8, vocab_size=4096, seq_len=256
)
UNTIED = GPT.model_copy(update={"tied_embeddings": False, "dropout": False, "positions": "rotary"})
MATRIX = 4096 * 512  # elements of a table
LAYER = 12 * 512**2  # of a layer's four matrices
BIASES = 9 * 512  # and of what is added behind them
WHOLE = Stage((BlockRun("layer", 3),), has_embedding=True, has_head=True)


def shape_of(
    stack: str = "ddp",
    model: ModelSpec = GPT,
    *,
    precision: Precision = Precision.BF16,
    tokens: int = 256,
    **fields: object,
) -> BlockShape:
    job = TrainingJob(model=model, global_batch_size=1, seq_len=tokens, precision=precision)
    plan = replace(ResolvedPlan(stages=(3,), attention=Attention.FLASH), **fields)  # type: ignore[arg-type]
    return BlockShape.of(job, plan, load_stack(stack))


def cached_bytes(shape: BlockShape) -> int:
    return TABLE.memory(shape, "layer").cached


def test_autocast_holds_the_casts_of_recomputed_layers_until_the_loss() -> None:
    full, none = (shape_of(recompute=mode) for mode in (Recompute.FULL, Recompute.NONE))
    assert cached_bytes(full) == 2 * (LAYER + BIASES)
    # Else backward holds matrices anyway; in fp32 nothing is cast; replicas' weights are no leaves.
    assert cached_bytes(none) == 2 * BIASES
    assert cached_bytes(shape_of(precision=Precision.FP32, recompute=Recompute.FULL)) == 0
    module = shape_of(
        "dataparallel",
        precision=Precision.FP16,
        recompute=Recompute.FULL,
        attention=Attention.UNFUSED,
    )
    assert cached_bytes(module) == 0

    def forward(num_layers: int, *, has_head: bool = True) -> int:
        layers = (BlockRun("layer", num_layers),) if num_layers else ()
        stage = Stage(layers, has_embedding=True, has_head=has_head)
        return pass_workspace_bytes(block_bytes(TABLE, full), stage)[0]

    casts = cached_bytes(full)
    assert [forward(n) - forward(0) for n in range(4)] == [n * casts for n in range(4)]
    # Without a head the last layer's pass is the fullest: the casts of those before it are there.
    headless = [forward(n, has_head=False) for n in range(1, 4)]
    assert headless[0] == TABLE.memory(full, "layer").forward
    assert [each - headless[0] for each in headless] == [n * casts for n in range(3)]
    # 16-bit and fp32 logits beside what is kept of them.
    assert forward(0) == 256 * 4096 * (2 + 4)


@pytest.mark.parametrize(
    ("stack", "precision", "size"),
    [
        ("ddp", Precision.FP32, 2 * 4),
        ("megatron-lm-2021", Precision.FP16, 2 * 2),
        # The product of the head adds to the kept gradient itself.
        ("megatron-core", Precision.BF16, 2),
    ],
)
def test_a_tied_tables_gradient_waits_for_that_of_the_embedding(
    stack: str, precision: Precision, size: int
) -> None:
    shape = shape_of(stack, precision=precision, tokens=1, attention=Attention.UNFUSED)
    memory = virtual_stage_memory(shape, WHOLE, block_bytes(TABLE, shape))
    needed = memory.saved_bytes + memory.backward_workspace_bytes
    assert needed == pytest.approx(MATRIX * size, rel=0.001)


def test_a_16_bit_weight_gradient_meets_its_fp32_one_but_not_the_weights_cast() -> None:
    """With one token weights are all there is: of an MLP matrix 2 + 4 bytes less a cast of 2."""
    layer = TABLE.memory(shape_of(tokens=1), "layer")
    assert layer.backward == pytest.approx((2 + 4 - 2) * 4 * 512**2, rel=0.001)


@pytest.mark.parametrize("stack", ["ddp", "megatron-core"])
def test_unfused_attention_keeps_keys_and_values_for_each_head(stack: str) -> None:
    grouped = GPT.model_copy(update={"num_kv_heads": 2, "positions": "rotary"})
    shape = shape_of(stack, grouped, attention=Attention.UNFUSED)
    # Where the core runs again, keys and values are kept as they come: a quarter of the queries.
    again = replace(shape, recompute=Recompute.SELECTIVE)
    flash = replace(shape, attention=Attention.FLASH)
    names = ("repeated rotated keys", "repeated values")
    for each, found in ((shape, 2), (again, 0), (flash, 0)):
        kept = TABLE.saved_tensors(each, "layer")
        sizes = [tensor.size_bytes for tensor in kept if tensor.name in names]
        assert sizes == [2 * 256 * 512] * found


def backward_bytes(job: TrainingJob, reduced: Precision | None) -> int:
    """Return what a backward pass of a DDP rank needs beside what is kept."""
    plan = ResolvedPlan(dp=8, stages=(1,), attention=Attention.FLASH, reduce_precision=reduced)
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
    shape = BlockShape.of(few, ResolvedPlan(stages=(1,), attention=Attention.FLASH), DDP)
    stage = Stage((BlockRun("layer", 1),), has_embedding=True, has_head=True)
    # The output matrix's gradient beside that of its input.
    assert backward_bytes(few, None) == 4 * MATRIX + 4 * 4 * 512
    # The table's gradient beside a copy of the last bucket, once all that was kept has gone.
    last = gradient_buckets(shape, stage)[-1].num_parameters
    assert last > MATRIX
    gone = sum(TABLE.memory(shape, kind).saved for kind in ("embedding", "layer", "head"))
    assert backward_bytes(few, Precision.BF16) == 4 * MATRIX + 2 * last - gone
