"""Memory of a rank: published closed forms, model states, and the peak over time."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.hwprofiles import (
    Allocator,
    Attention,
    LossKernel,
    Precision,
    Recompute,
    StackProfile,
    load_cluster,
    load_stack,
)
from meshwright.simulator.blocks import BlockShape, BlockTable, NamedBytes
from meshwright.simulator.layout import Mesh, Stage
from meshwright.simulator.layout.plan import ResolvedPlan, TrainingJob
from meshwright.simulator.memory import (
    BlockMemory,
    Fragmentation,
    Overheads,
    ReallocatedGradients,
    SentBytes,
    block_bytes,
    dummy_gradient_bytes,
    num_communicators,
    usable_bytes,
    workspace_bytes,
)
from meshwright.simulator.memory.counts import pass_states
from meshwright.simulator.memory.rank import (
    KeptUnits,
    PassPeak,
    PassPeaks,
    RankMemory,
    RankStates,
    Shards,
    StateBytes,
    VirtualStageMemory,
    rank_memory,
    sharded_workspace_bytes,
    virtual_stage_memory,
    with_workspace,
)
from meshwright.simulator.memory.timeline import memory_timeline, peak_event
from meshwright.simulator.model import EMBEDDING, HEAD, BlockKind, BlockRun
from meshwright.simulator.model.catalogue import load_model
from meshwright.simulator.model.parameters import count_parameters
from meshwright.simulator.model.spec import ModelSpec
from meshwright.simulator.replication import stage_parameters
from meshwright.simulator.schedules import SCHEDULES, Action, Phase, get_schedule

RELAXED = settings(deadline=None, max_examples=100)
STACK = load_stack("megatron-lm-2022")
GPT2 = load_model("gpt2")
FUSED = load_stack("megatron-core")
BYTES = st.integers(0, 10**12)
TABLE = BlockTable()
INNER = Stage((BlockRun("layer", 3),), has_embedding=False, has_head=False)


def gpt(num_heads: int = 16, head_dim: int = 64) -> ModelSpec:
    """Return a model of the family that the closed forms were written for."""
    return ModelSpec(
        name="gpt",
        num_layers=4,
        hidden_size=num_heads * head_dim,
        num_heads=num_heads,
        vocab_size=50_000,
        seq_len=1024,
        max_positions=65_536,
    )


def block_shape(
    model: ModelSpec,
    *,
    seq_len: int = 1024,
    microbatch_size: int = 1,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: Recompute = Recompute.NONE,
    attention: Attention = Attention.UNFUSED,
    precision: Precision = Precision.BF16,
    stack: StackProfile = STACK,
) -> BlockShape:
    job = TrainingJob(
        model=model, global_batch_size=microbatch_size, seq_len=seq_len, precision=precision
    )
    plan = ResolvedPlan(
        tp=tp,
        microbatch_size=microbatch_size,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        attention=attention,
        stages=(model.num_layers,),
    )
    return BlockShape.of(job, plan, stack)


def statistics(tensors: Iterable[NamedBytes]) -> list[int]:
    """Return the bytes of each norm's statistics among *tensors*."""
    kinds = ("norm mean", "norm deviation")
    return [tensor.size_bytes for tensor in tensors if tensor.name.endswith(kinds)]


def published_bytes(shape: BlockShape, kind: str = "layer") -> int:
    """Return what a block keeps, as the published formulas count it: without norm statistics."""
    tensors = TABLE.saved_tensors(shape, kind)
    assert sum(tensor.size_bytes for tensor in tensors) == TABLE.memory(shape, kind).saved
    return TABLE.memory(shape, kind).saved - sum(statistics(tensors))


def workspaces(shape: BlockShape, kind: str = "layer") -> tuple[int, int]:
    """Return what a block's forward and backward need beside what is kept."""
    memory = TABLE.memory(shape, kind)
    return memory.forward, memory.backward


SIZES = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 4, 8]),
        "heads_per_rank": st.integers(1, 6),
        "head_dim": st.sampled_from([8, 64, 96, 128]),
        "chunks_of_sequence": st.integers(1, 40),
        "microbatch_size": st.integers(1, 5),
    }
)


@RELAXED
@given(sizes=SIZES)
def test_activations_of_a_layer_are_korthikantis_closed_forms(sizes: dict[str, int]) -> None:
    t, b = sizes["tp"], sizes["microbatch_size"]
    a, s = t * sizes["heads_per_rank"], 8 * sizes["chunks_of_sequence"]
    model = gpt(a, sizes["head_dim"])
    h = model.hidden_size
    sbh, scores = s * b * h, 5 * a * s * s * b  # 5 a s / h times s b h

    def kept(*, tp: int = 1, sequence: bool = False, recompute: Recompute = Recompute.NONE) -> int:
        shape = block_shape(
            model,
            seq_len=s,
            microbatch_size=b,
            tp=tp,
            sequence_parallel=sequence,
            recompute=recompute,
        )
        return published_bytes(shape)

    assert kept() == 34 * sbh + scores
    assert kept(tp=t) == 10 * sbh + (24 * sbh + scores) // t
    assert kept(tp=t, sequence=True) == (34 * sbh + scores) // t
    assert kept(tp=t, sequence=True, recompute=Recompute.SELECTIVE) == 34 * sbh // t
    assert kept(tp=t, recompute=Recompute.SELECTIVE) == 10 * sbh + 24 * sbh // t
    assert kept(tp=t, recompute=Recompute.FULL) == 2 * sbh
    assert kept(tp=t, sequence=True, recompute=Recompute.FULL) == 2 * sbh // t


def test_norm_statistics_are_two_fp32_numbers_a_token_and_norm() -> None:
    for sequence_parallel, tokens in ((False, 3 * 1024), (True, 3 * 1024 // 4)):
        shape = block_shape(gpt(), microbatch_size=3, tp=4, sequence_parallel=sequence_parallel)
        assert statistics(TABLE.saved_tensors(shape, "layer")) == [4 * tokens] * 4
        assert statistics(TABLE.saved_tensors(shape, "head")) == [4 * tokens] * 2


def test_selective_recomputation_saves_70_percent_of_gpt3s_activations() -> None:
    # 5 a s / h = 80 against 34 (Korthikanti et al. 2022, arXiv 2205.05198, section 5).
    gpt3 = load_model("gpt3-175b")
    none, selective = (
        published_bytes(block_shape(gpt3, seq_len=2048, recompute=mode))
        for mode in (Recompute.NONE, Recompute.SELECTIVE)
    )
    assert none == 2048 * 12288 * (34 + 80)
    assert selective == 2048 * 12288 * 34
    assert (none - selective) / none == pytest.approx(0.70, abs=0.005)


def test_a_llama_layer_keeps_what_counting_its_tensors_gives() -> None:
    model = load_model("llama3-70b")
    h, g, f, s, tp = 8192, 1024, 28_672, 4096, 4
    shape = block_shape(model, seq_len=s, tp=tp, attention=Attention.FLASH, stack=FUSED)
    inside = (h + 2 * g) + (h + g) + h + 2 * f + f  # qkv, rotated, output, gate and value, product
    lse = model.num_heads * s * 4
    assert published_bytes(shape) == 2 * s * (4 * h + inside // tp) + lse // tp
    assert statistics(TABLE.saved_tensors(shape, "layer")) == [4 * s] * 2  # rms norm: one number


@pytest.mark.parametrize("attention", Attention)
def test_selective_recomputation_drops_exactly_the_attention_core(attention: Attention) -> None:
    none, selective = (
        block_shape(gpt(), tp=2, attention=attention, recompute=mode, stack=FUSED)
        for mode in (Recompute.NONE, Recompute.SELECTIVE)
    )
    heads, s = 8, 1024
    core = {Attention.UNFUSED: 5 * heads * s * s, Attention.FLASH: 4 * heads * s}
    assert published_bytes(none) - published_bytes(selective) == core[attention]


def test_a_model_without_dropout_keeps_no_masks() -> None:
    plain = gpt().model_copy(update={"dropout": False})
    sbh, a, s = 1024 * 1024, 16, 1024
    assert published_bytes(block_shape(plain)) == 32 * sbh + 2 * a * s * s


def test_fp32_activations_are_twice_as_large_but_for_the_masks() -> None:
    sbh, a, s = 1024 * 1024, 16, 1024
    kept = published_bytes(block_shape(gpt(), precision=Precision.FP32))
    assert kept == 2 * 32 * sbh + 2 * sbh + (2 * 4 + 1) * a * s * s


def test_embedding_and_head_keep_ids_masks_norm_and_probabilities() -> None:
    s, h, vocab = 1024, 1024, 50_048  # padded to a multiple of 128
    assert published_bytes(block_shape(gpt()), "embedding") == 8 * s + s * h
    assert published_bytes(block_shape(gpt()), "head") == 4 * s * h + 4 * s * vocab
    assert published_bytes(block_shape(gpt(), stack=FUSED), "head") == 4 * s * h + 2 * s * vocab
    split = block_shape(gpt(), tp=4, sequence_parallel=True)
    assert published_bytes(split, "embedding") == 8 * s + s * h // 4
    wider = 50_176  # padded to a multiple of 4 x 128
    assert published_bytes(split, "head") == (4 * s * h + 4 * s * wider) // 4


def test_workspaces_are_the_tensors_that_live_for_a_moment() -> None:
    s, h, f = 1024, 1024, 4096
    flash = block_shape(
        gpt().model_copy(update={"dropout": False}), stack=FUSED, attention=Attention.FLASH
    )
    # Forward ends with the second product beside its sum with the residual stream; backward is
    # fullest where the activation's gradient stands beside the layer's.
    assert workspaces(flash) == (2 * 2 * s * h, 2 * s * h + 2 * s * f)
    full = replace(flash, recompute=Recompute.FULL)
    again = TABLE.memory(flash, "layer").saved - 2 * s * h
    # Nothing is kept: residual stream, norm, and both sides of the activation.
    forward = 2 * s * (2 * h + 2 * f)
    # Backward has a name for what it made again of the layer's output.
    assert workspaces(full) == (forward, again + 2 * 2 * s * h + 2 * s * f)
    # Fused: the gradient takes the place of the logits, beside that of the norm's output.
    loss = 4
    assert workspaces(flash, "head") == (loss, 2 * s * h)


def test_a_gradient_added_to_its_sum_has_a_stand_in_of_each_shape() -> None:
    model = gpt().model_copy(update={"mlp_bias": True, "ffn_hidden_size": 3072})
    h, f, rows, num_layers = 1024, 3072, 50_176 // 2, [BlockRun("layer", 2)]
    stack = load_stack("megatron-core-serial")
    shape = block_shape(model, stack=stack, tp=2, attention=Attention.FLASH)
    # Of all layers one; queries, keys and values are as large as what opens the MLP.
    layers = 2 * (3 * h // 2 * h + h * h // 2 + h * f // 2)
    assert dummy_gradient_bytes(shape, num_layers) == layers
    assert dummy_gradient_bytes(shape, [*num_layers, BlockRun(HEAD, 1)]) == layers + 2 * rows * h
    others = {"fused_gradient_accumulation": False}, {"keeps_stand_ins": False}
    for other in others:
        own = replace(shape, stack=stack.model_copy(update=other))
        assert dummy_gradient_bytes(own, num_layers) == 0


# Bytes of 16-bit logits, fp32 copies and probabilities, and of a gradient beside them.
@pytest.mark.parametrize(("kernel", "most"), [("in-place", 6), ("shifted", 10), ("eager", 12)])
def test_a_loss_holds_so_many_bytes_a_logit(kernel: str, most: int) -> None:
    stack = load_stack("megatron-lm-2022").model_copy(update={"loss": LossKernel(kernel)})
    kept = 4 * 1024 * 50_048
    loss = 0 if kernel == "eager" else 4  # is there while the forward needs the most
    needed = max(workspaces(block_shape(gpt(), stack=stack), "head"))
    assert kept + needed == most * 1024 * 50_048 + loss


@given(n=st.integers(1, 10**12), dp=st.integers(1, 10**4), zero_stage=st.sampled_from([0, 1]))
def test_zero_stage_1_splits_the_optimizer_alone(n: int, dp: int, zero_stage: int) -> None:
    state = StateBytes.of(FUSED, Precision.BF16)
    assert (state.parameter, state.gradient, state.optimizer) == (2, 4, 12)
    num_shards = dp if zero_stage else 1
    memory = rank_memory(RankStates.of(n, state, Shards.of(dp, zero_stage)))
    sharded = -(-n // num_shards)
    assert memory.static_bytes == 6 * n + 12 * sharded


def test_fp32_training_needs_16_bytes_a_parameter() -> None:
    state = StateBytes.of(STACK, Precision.FP32)
    for zero_stage, expected in ((0, 16_000), (1, 8_000 + 8 * 125)):
        shards = Shards.of(8, zero_stage)
        assert rank_memory(RankStates.of(1000, state, shards)).static_bytes == expected


def stage_of(num_layers: int, *, has_embedding: bool, has_head: bool) -> Stage:
    return Stage((BlockRun("layer", num_layers),), has_embedding=has_embedding, has_head=has_head)


def stage_memory(shape: BlockShape, stage: Stage) -> VirtualStageMemory:
    return virtual_stage_memory(shape, stage, block_bytes(TABLE, shape))


def test_stages_hold_the_model_and_a_copied_table() -> None:
    model = load_model("gpt2").model_copy(update={"vocab_size": 50_304})  # needs no padding
    shape = block_shape(model)
    whole = stage_parameters(
        shape, Stage((BlockRun("layer", 12),), has_embedding=True, has_head=True)
    )
    assert whole == count_parameters(model)
    first = stage_parameters(
        shape, Stage((BlockRun("layer", 5),), has_embedding=True, has_head=False)
    )
    last = stage_parameters(
        shape, Stage((BlockRun("layer", 7),), has_embedding=False, has_head=True)
    )
    assert first + last == whole + 50_304 * 768
    untied = model.model_copy(update={"tied_embeddings": False})
    shape = block_shape(untied)
    first = stage_parameters(
        shape, Stage((BlockRun("layer", 5),), has_embedding=True, has_head=False)
    )
    last = stage_parameters(
        shape, Stage((BlockRun("layer", 7),), has_embedding=False, has_head=True)
    )
    assert first + last == count_parameters(untied) == whole + 50_304 * 768


def test_a_virtual_stage_adds_its_layers_and_the_larger_workspace() -> None:
    shape = block_shape(gpt())
    embedding, layer, head = (TABLE.memory(shape, kind) for kind in ("embedding", "layer", "head"))
    blocks = block_bytes(TABLE, shape)
    inner = virtual_stage_memory(shape, INNER, blocks)
    assert inner == VirtualStageMemory(
        saved_bytes=3 * layer.saved,
        forward_workspace_bytes=layer.forward,
        backward_workspace_bytes=layer.backward,
        sent=SentBytes(layer.sent, layer.received),
    )
    ends = virtual_stage_memory(shape, stage_of(3, has_embedding=True, has_head=True), blocks)
    assert ends.saved_bytes - inner.saved_bytes == embedding.saved + head.saved
    # A layer runs while nothing of the head is kept yet, or any more.
    assert ends.forward_workspace_bytes == max(layer.forward - head.saved, head.forward)
    assert ends.backward_workspace_bytes == max(layer.backward - head.saved, head.backward)


@pytest.mark.parametrize(
    ("num_kv_heads", "positions", "messages"),
    [(4, "learned", 1), (16, "learned", 0), (4, "rotary", 0)],
)
def test_transformer_engine_copies_keys_and_values_of_fewer_heads(
    num_kv_heads: int, positions: str, messages: int
) -> None:
    # Copies let the product of queries, keys and values go, of which the queries are one already.
    model = gpt().model_copy(update={"num_kv_heads": num_kv_heads, "positions": positions})
    views = FUSED.model_copy(update={"transformer_engine": False})
    saved = [
        TABLE.memory(block_shape(model, attention=Attention.FLASH, stack=stack), "layer").saved
        for stack in (views, FUSED)
    ]
    assert saved[0] - saved[1] == messages * 2 * 1024 * model.hidden_size


@pytest.mark.parametrize("kind", ["embedding", "head"])
def test_an_end_of_the_model_without_layers_needs_no_workspace_of_a_layer(kind: str) -> None:
    shape = block_shape(gpt(), recompute=Recompute.FULL)
    stage = Stage((), has_embedding=kind == "embedding", has_head=kind == "head")
    found = virtual_stage_memory(shape, stage, block_bytes(TABLE, shape))
    alone = TABLE.memory(shape, kind)
    assert (found.saved_bytes, found.backward_workspace_bytes) == (alone.saved, alone.backward)
    assert found.forward_workspace_bytes == alone.forward


def virtual_stage_sizes() -> st.SearchStrategy[VirtualStageMemory]:
    return st.builds(
        VirtualStageMemory,
        saved_bytes=BYTES,
        forward_workspace_bytes=BYTES,
        backward_workspace_bytes=BYTES,
    )


def static_rank(
    virtual_stages: tuple[VirtualStageMemory, ...], update_temporary_bytes: int = 0
) -> RankMemory:
    return RankMemory(
        parameters_bytes=1000,
        gradients_bytes=2000,
        optimizer_states_bytes=6000,
        update_temporary_bytes=update_temporary_bytes,
        virtual_stages=virtual_stages,
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@RELAXED
@given(
    virtual_stage=virtual_stage_sizes(),
    update_bytes=BYTES,
    pp=st.integers(1, 8),
    num_microbatches=st.integers(1, 24),
    data=st.data(),
)
def test_the_peak_is_static_plus_in_flight_plus_the_larger_workspace(
    name: str,
    virtual_stage: VirtualStageMemory,
    update_bytes: int,
    pp: int,
    num_microbatches: int,
    data: st.DataObject,
) -> None:
    pp_rank = data.draw(st.integers(0, pp - 1))
    schedule = get_schedule(name)
    actions = schedule.rank_actions(pp_rank, pp, num_microbatches, 1)
    memory = static_rank((virtual_stage,), update_bytes)
    passes = [(action, 10 * i, 10 * i + 7) for i, action in enumerate(actions)]
    events = memory_timeline(memory, passes, 10 * len(actions))
    in_flight = schedule.in_flight(pp_rank, pp, num_microbatches, 1)
    workspace = max(virtual_stage.forward_workspace_bytes, virtual_stage.backward_workspace_bytes)
    expected = max(in_flight * virtual_stage.saved_bytes + workspace, update_bytes)
    peak = max(events, key=lambda event: event.dynamic_bytes)
    assert memory.static_bytes + peak.dynamic_bytes == 9000 + expected
    assert peak_event(memory, actions, passes.__getitem__, 10 * len(actions)) == peak
    fullest = [e for e in events if e.activations_bytes + e.buffers_bytes == expected]
    assert (peak.time_ps, peak.moment) == (fullest[0].time_ps, fullest[0].moment)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@RELAXED
@given(
    virtual_stages=st.lists(virtual_stage_sizes(), min_size=3, max_size=3),
    multiple=st.integers(1, 4),
)
def test_no_activation_outlives_the_last_backward(
    name: str, virtual_stages: list[VirtualStageMemory], multiple: int
) -> None:
    schedule = SCHEDULES[name]
    vpp = 3 if schedule.interleaves else 1
    for pp_rank in range(4):
        actions = schedule.rank_actions(pp_rank, 4, 4 * multiple, vpp)
        passes = [(action, i, i + 1) for i, action in enumerate(actions)]
        events = memory_timeline(static_rank(tuple(virtual_stages)), passes, len(actions))
        assert [event.time_ps for event in events] == sorted(event.time_ps for event in events)
        assert min(event.activations_bytes for event in events) >= 0
        assert (events[-1].activations_bytes, events[-1].moment) == (0, "optimizer")


def test_gradients_that_come_late_are_not_there_before_their_first_backward() -> None:
    """Two stages; in the first backward pass of each, 3 of its 10 are still missing at its peak.

    What is gathered after a pass counts until the next pass of its virtual stage, whose workspace
    has it.
    """
    virtual_stage = VirtualStageMemory(
        saved_bytes=100,
        forward_workspace_bytes=7,
        backward_workspace_bytes=30,
        reallocated_gradients_bytes=10,
        first_backward=PassPeak(25, absent_bytes=3),
        after_forward_bytes=2,
        after_backward_bytes=5,
    )
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    order = [(forward, 0), (forward, 1), (backward, 1), (backward, 0), (forward, 0), (backward, 0)]
    actions = [
        Action(phase, of_virtual_stage, index // 4)
        for index, (phase, of_virtual_stage) in enumerate(order)
    ]
    passes = [(action, 10 * i, 10 * i + 5) for i, action in enumerate(actions)]
    memory = replace(static_rank((virtual_stage, virtual_stage), 1), buffers_bytes=1000)
    events = memory_timeline(memory, passes, 99)
    assert [(e.activations_bytes, e.buffers_bytes, e.absent_bytes) for e in events] == [
        (1100, 7, 20),
        (1100, 2, 20),
        (1200, 7 + 2, 20),
        (1200, 2 + 2, 20),
        (1200, 25 + 2, 10 + 3),  # the other virtual stage's are missing, too
        (1100, 5 + 2, 10),
        (1100, 25 + 5, 3),
        (1000, 5 + 5, 0),
        (1100, 7 + 5, 0),
        (1100, 2 + 5, 0),
        (1100, 30 + 5, 0),
        (1000, 5 + 5, 0),
        (1000, 1, 0),
    ]
    peak = max(events, key=lambda event: event.dynamic_bytes)
    assert (peak.moment, peak.dynamic_bytes, peak.absent_bytes) == ("B1.0", 1214, 13)


def test_a_timeline_names_each_moment() -> None:
    virtual_stage = VirtualStageMemory(
        saved_bytes=100, forward_workspace_bytes=7, backward_workspace_bytes=30
    )
    actions = get_schedule("1f1b").rank_actions(0, 2, 2, 1)
    passes = [(action, 10 * i, 10 * i + 5) for i, action in enumerate(actions)]
    events = memory_timeline(static_rank((virtual_stage,), 64), passes, 99)
    assert [(e.time_ps, e.moment, e.activations_bytes, e.buffers_bytes) for e in events] == [
        (0, "F0.0", 100, 7),
        (5, "after F0.0", 100, 0),
        (10, "F0.1", 200, 7),
        (15, "after F0.1", 200, 0),
        (20, "B0.0", 200, 30),
        (25, "after B0.0", 100, 0),
        (30, "B0.1", 100, 30),
        (35, "after B0.1", 0, 0),
        (99, "optimizer", 0, 64),
    ]
    peak = max(events, key=lambda event: event.dynamic_bytes)
    assert (peak.dynamic_bytes, peak.time_ps, peak.moment) == (230, 20, "B0.0")


def test_passes_gather_a_unit_and_the_next_and_make_one_whole_gradient() -> None:
    state = StateBytes(parameter=2, gradient=4, optimizer=8, update_temporary=0)
    units, whole = [10, 30, 20], 30 * 4
    assert sharded_workspace_bytes(units, state, Shards(8, 8, 8)) == (50 * 2, 50 * 2 + whole)
    kept = sharded_workspace_bytes(units, state, Shards(8, 8, 8), reshards=False)
    assert kept == (60 * 2, 60 * 2 + whole)
    assert sharded_workspace_bytes(units, state, Shards(1, 8, 8)) == (0, whole)
    assert sharded_workspace_bytes(units, state, Shards(1, 1, 8)) == (0, 0)


def test_what_passes_hold_for_a_moment_adds_to_what_they_held() -> None:
    stage = VirtualStageMemory(saved_bytes=1, forward_workspace_bytes=7, backward_workspace_bytes=9)
    more = with_workspace(stage, (20, 300))
    assert (more.forward_workspace_bytes, more.backward_workspace_bytes) == (27, 309)
    assert more.saved_bytes == 1


@pytest.mark.parametrize(
    ("reshards", "found"),
    [
        (False, "SHARDED GATHERED GATHERED GATHERED"),
        (True, "SHARDED SHARDED SHARDED GATHERED"),
    ],
)
def test_units_are_gathered_whole_after_a_backward_pass_or_where_they_stay(
    *, reshards: bool, found: str
) -> None:
    """The first of two ranks runs F0 F1 B0 B1."""
    actions = get_schedule("1f1b").rank_actions(0, 2, 2, 1)
    states = pass_states(actions, 1, reshards=reshards)
    assert " ".join(each.found.name for each in states) == found


def test_units_are_gathered_ahead_of_passes_and_reduced_after_the_last() -> None:
    """Four virtual stages, of which three are gathered at a time (`_add_unshard_reshard`).

    Before F1 stage 0 is freed and 3 gathered, before B2 3 is freed and 0 gathered; no other is
    gathered anew.  What is gathered of a stage is in what its own passes need.
    """
    nothing = PassPeak(0, 0)
    kept = KeptUnits(
        whole=PassPeaks(nothing, PassPeak(20, absent_bytes=2), nothing),
        ahead=PassPeaks(PassPeak(7, absent_bytes=0), PassPeak(25, absent_bytes=3), nothing),
        ahead_bytes=1000,
        reduction=PassPeak(40, absent_bytes=8),
    )
    virtual_stage = VirtualStageMemory(
        saved_bytes=100,
        forward_workspace_bytes=0,
        backward_workspace_bytes=0,
        reallocated_gradients_bytes=10,
        after_forward_bytes=300,
        after_backward_bytes=200,
        kept_units=kept,
    )
    order = [*((Phase.FORWARD, n) for n in range(4)), *((Phase.BACKWARD, n) for n in (3, 2, 1, 0))]
    passes = [(Action(*each, 0), 10 * i, 10 * i + 5) for i, each in enumerate(order)]
    events = memory_timeline(static_rank((virtual_stage,) * 4, 1), passes, 99)
    assert [(e.activations_bytes, e.buffers_bytes, e.absent_bytes) for e in events] == [
        (100, 2000 + 7, 40),  # F0, beside 1 and 2
        (100, 2000 + 300, 40),
        (200, 2000 + 7, 40),  # F1, beside 2 and 3
        (200, 2000 + 300, 40),
        (300, 1000 + 300 + 7, 40),  # F2, beside 3, and 1 after its pass
        (300, 1000 + 600, 40),
        (400, 600 + 7, 40),
        (400, 900, 40),
        (400, 600 + 20, 30 + 2),  # B3 finds its units whole
        (300, 600 + 200 + 40, 30),
        (300, 1000 + 300 + 20, 20 + 8 + 2),  # B2, beside 0 and 1
        (200, 1000 + 300 + 200 + 40, 20 + 8),
        (200, 1000 + 20, 10 + 16 + 2),
        (100, 1000 + 200 + 40, 10 + 16),
        (100, 25, 24 + 3),  # B0 finds them in the buffers of stages gathered ahead
        (0, 200 + 40, 24),
        (0, 1, 32),
    ]


def test_a_device_holds_workspaces_context_and_communicators_beside_tensors() -> None:
    facts = {"allocator_fraction": 0.25, "allocator_state_fraction": 0.05, "context_bytes": 17}
    facts["transformer_engine"] = False
    stack, cluster = STACK.model_copy(update=facts), load_cluster("dgx-a100")
    workspace = (
        2 * (2 * 4096 + 8 * 16) * 1024
    )  # of two threads, each PyTorch's default before Hopper
    overheads = Overheads.of(cluster.device, stack, GPT2, 3)
    assert overheads == (workspace, (2500, 500, True), 17 + 3 * 688 * 1024**2)
    # A quarter beyond what is allocated and freed, a twentieth beyond states.
    parts = overheads.fragmentation.reserved_parts(1000, 600)
    assert overheads.reserved_bytes(parts) == (400 + workspace) * 5 // 4 + 600 * 21 // 20
    assert overheads.device_bytes(parts) == overheads.reserved_bytes(parts) + 17 + 3 * 688 * 1024**2
    grown = Overheads.of(
        cluster.device, stack.model_copy(update={"allocator": Allocator.EXPANDABLE}), GPT2
    )
    assert grown.reserved_bytes(grown.fragmentation.reserved_parts(1000, 600)) == 1000 + workspace
    engine = stack.model_copy(update={"transformer_engine": True})
    assert workspace_bytes(cluster.device, engine, GPT2) == workspace + 4 * 1024**2
    # Products of experts start on four streams more (get_cublas_workspace of Transformer Engine).
    routed, apart = load_model("mixtral-8x7b"), {"grouped_experts": False}
    assert workspace_bytes(cluster.device, engine, routed) == workspace + 5 * 4 * 1024**2
    engine = engine.model_copy(update=apart)
    assert workspace_bytes(cluster.device, engine, routed) == workspace + 4 * 1024**2
    assert usable_bytes(cluster, None) == cluster.device.usable_bytes < 80 * 1024**3
    assert usable_bytes(cluster, 123) == 123


def test_a_device_whose_file_says_nothing_of_it_is_all_for_tensors() -> None:
    cluster = load_cluster("localhost-cpu")
    assert Overheads.of(cluster.device, STACK, GPT2, 3) == (
        0,
        Fragmentation.of(STACK),
        STACK.context_bytes,
    )
    assert usable_bytes(cluster, None) == cluster.device.memory_capacity_bytes


@pytest.mark.parametrize(
    ("degrees", "tied", "expected"),
    [
        ((1, 1, 1), True, 0),
        ((8, 1, 1), True, 1),
        ((1, 64, 1), False, 1),
        ((8, 4, 1), True, 3),  # and one for all ranks
        ((1, 1, 2), True, 2),  # and one between the ends that share a table
        ((8, 4, 12), True, 5),
        ((8, 4, 12), False, 4),
    ],
)
def test_a_rank_is_in_a_communicator_for_each_group(
    degrees: tuple[int, ...], expected: int, *, tied: bool
) -> None:
    tp, dp, pp = degrees
    mesh = Mesh(tp=tp, dp=dp, pp=pp, node_size=8)
    assert num_communicators(mesh, is_tied=tied) == expected


def test_a_ring_of_swaps_has_two_communicators_in_the_place_of_one() -> None:
    # Beside it: of all replicas, and of all ranks.
    for inner, expected in ((1, 3), (4, 4), (8, 3)):
        mesh = Mesh(cp=8, cp_inner=inner, node_size=8)
        assert num_communicators(mesh, is_tied=False) == expected


SIZES = st.integers(0, 1000)
BLOCKS = st.fixed_dictionaries(
    {kind: st.tuples(SIZES, SIZES, SIZES) for kind in (HEAD, "layer", EMBEDDING)}
)


@RELAXED
@given(sizes=BLOCKS, waiting=SIZES, layers=st.integers(1, 4))
def test_late_gradients_are_fullest_at_a_block_of_the_first_backward_pass(
    sizes: dict[BlockKind, tuple[int, int, int]], waiting: int, layers: int
) -> None:
    """Block by block from the last: what a block saved goes, its gradients come."""
    nothing = BlockMemory(*[0] * len(BlockMemory._fields))
    blocks = {
        kind: nothing._replace(saved=saved, backward=backward)
        for kind, (saved, backward, _) in sizes.items()
    }
    blocks[HEAD] = blocks[HEAD]._replace(waiting=waiting)
    late = ReallocatedGradients(blocks, {kind: made for kind, (_, _, made) in sizes.items()})
    stage = stage_of(layers, has_embedding=True, has_head=True)
    freed, absent = 0, late.total_bytes(stage)
    moments = [(0, absent)]
    for kind in (HEAD, *["layer"] * layers, EMBEDDING):
        saved, backward, made = sizes[kind]
        moments.append((backward + (kind != HEAD) * waiting - freed, absent))
        freed, absent = freed + saved, absent - made
    fullest = late.fullest(stage)
    assert absent == 0
    assert fullest in moments
    assert fullest.total_bytes == max(needed - missing for needed, missing in moments)


def test_sums_of_gradients_leave_with_the_last_backward() -> None:
    """Of 10 bytes of sums 8 go in the pass that reduces them, which holds less than others do."""
    virtual_stage = VirtualStageMemory(
        saved_bytes=100,
        forward_workspace_bytes=7,
        backward_workspace_bytes=30,
        reallocated_gradients_bytes=10,
        first_backward=PassPeak(25, absent_bytes=3),
        last_backward=PassPeak(28, absent_bytes=1),
        reduced_gradients_bytes=8,
    )
    actions = [Action(phase, 0, index) for index in range(3) for phase in Phase]
    passes = [(action, 10 * i, 10 * i + 5) for i, action in enumerate(actions)]
    events = memory_timeline(static_rank((virtual_stage,), 1), passes, 99)
    first = [(7, 10), (0, 10), (25, 3), (0, 0)]
    later = [(7, 0), (0, 0), (30, 0), (0, 0)]
    last = [(7, 0), (0, 0), (28, 1), (0, 8)]
    shown = [(event.buffers_bytes, event.absent_bytes) for event in events]
    assert shown == [*first, *later, *last, (1, 8)]
