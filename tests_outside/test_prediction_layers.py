"""MTP layers of Megatron-Core against those of the graph: bytes, FLOPs, calls."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from block_graph import as_measured
from block_witness import Given, Measured, count_pass
from torch import Tensor
from witnesses import megatron_job

from meshwright.hwprofiles import Attention, Recompute
from meshwright.planner.reports import SavedPlan
from meshwright.simulator.blocks import BlockShape, BorderGradients, walk
from meshwright.simulator.blocks.dims import LayerDims
from meshwright.simulator.blocks.ends import final_norm, head, predictions
from meshwright.simulator.blocks.kinds import BLOCKS
from meshwright.simulator.graph import Block, BlockMemory
from meshwright.simulator.graph import Tensor as Written
from meshwright.simulator.model import HEAD, count_parameters, with_mtp_layers
from meshwright.validate.counting import RankOracle
from meshwright.validate.outside import load_outside_plans
from meshwright.validate.ranks import CollectiveCount, predict_members

PLANS = {plan.name: plan for plan in load_outside_plans()}
# The loss keeps of each token whether it is of another rank's rows, and its number there.
LOSS_BYTES = 9
# Of each further token, too: its loss in fp32 and its number of the mask, an int64.
MASKED_BYTES = 12
LOOKED_UP_BYTES = 1  # of each further token: whether another tensor rank looks it up
SCALE_BYTES = 4  # of the softmax: Megatron-Core makes a tensor of it, which a GPU has on the host
SCALAR_BYTES = 16
WAYS = "send", "recv"
# Of each layer: ids, positions and labels, in int64, and a mask in fp32, one sequence at a time.
SHIFTED = {(way, size): number for way in WAYS for size, number in ((8, 3), (4, 1))}
# Losses, masks and labels of a token that live for a moment beside logits.
MOMENT_BYTES = 64
SHIFTED_BYTES = 3  # of a token's numbers that a layer's pass still has while it runs again


def predicting(name: str, number: int) -> SavedPlan:
    """Return a plan whose model has so many MTP layers."""
    saved = PLANS[name].saved()
    return replace(saved, job=replace(saved.job, model=with_mtp_layers(saved.job.model, number)))


def counted_head(saved: SavedPlan, number: int = 0) -> Measured:
    """Return what Megatron-Core does from the last layer's tokens to the loss."""
    job, plan = saved.job, saved.plan
    num_own = job.seq_len // plan.cp
    tokens = num_own // (plan.tp if plan.sequence_parallel else 1)
    with megatron_job.built(saved, number) as rank:
        gpt = rank._chunks[-1].module.module
        rotary_embedding = gpt.rotary_pos_emb(job.seq_len)
        ids = torch.zeros((plan.microbatch_size, num_own), dtype=torch.long)
        positions = torch.arange(num_own).expand_as(ids)

        def run(x: Tensor) -> Tensor:
            losses = gpt._postprocess(
                hidden_states=gpt.decoder.final_layernorm(x),
                input_ids=ids,
                position_ids=positions,
                labels=ids,
                loss_mask=torch.ones(ids.shape) if plan.cp > 1 else None,  # as in training
                rotary_pos_emb=rotary_embedding,
                rotary_pos_cos=None,
                rotary_pos_sin=None,
                mtp_in_postprocess=gpt.mtp_process,
            )
            loss: Tensor = losses.float().mean()
            return loss

        given = Given((tokens, plan.microbatch_size, job.transformer.hidden_size))
        return count_pass(run, [given], RankOracle(rank.groups))


def norm_and_head(block: Block, shape: BlockShape, dims: LayerDims) -> Written:
    """Write the final norm and what is behind it as one block."""
    x = dims.stream(block, shape)
    head(block, predictions(block, final_norm(block, x, shape), shape, dims), shape, dims)
    return x


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    "name", ["megatron predicting", "megatron predicting tp", "megatron predicting tp sp"]
)
def test_a_head_that_predicts_further_is_byte_exact(
    name: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BLOCKS, HEAD, norm_and_head)
    saved = predicting(name, number)
    counted = counted_head(saved)
    shape = BlockShape.of(saved.job, saved.plan, saved.stack)
    walked = walk(shape, HEAD, ending=BorderGradients(keeps_gradients=False))
    found, buffer = as_measured(walked), BlockMemory.of(walked).buffer
    tokens = saved.plan.microbatch_size * saved.job.seq_len
    lasting = buffer + kept_of_losses(saved, number)
    moment = counted.forward_peak_bytes - found.forward_peak_bytes - lasting
    assert 0 <= moment < MOMENT_BYTES * tokens
    assert found == replace(
        counted,
        saved_bytes=counted.saved_bytes - lasting,
        forward_peak_bytes=found.forward_peak_bytes,
        backward_peak_bytes=counted.backward_peak_bytes - lasting + SCALE_BYTES,
        left_bytes=counted.left_bytes - buffer - number * SCALE_BYTES,
        forward_calls=tuple(each for each in counted.forward_calls if each.axis == "tp"),
        backward_calls=tuple(each for each in counted.backward_calls if each.axis == "tp"),
    )


def kept_of_losses(saved: SavedPlan, number: int) -> int:
    """Return the bytes of numbers that all losses keep of tokens."""
    tokens = saved.plan.microbatch_size * saved.job.seq_len
    of_further = LOSS_BYTES + MASKED_BYTES + LOOKED_UP_BYTES * (saved.plan.tp > 1)
    return tokens * (LOSS_BYTES + number * of_further) + number * SCALAR_BYTES


@pytest.mark.parametrize(("name", "number"), [("", 2), (" tp sp", 2), (" tp sp", 3)])
def test_layers_that_run_again_one_by_one_need_as_many_bytes(
    name: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of the table that they share is there from the last layer's backward on."""
    monkeypatch.setitem(BLOCKS, HEAD, norm_and_head)
    saved = predicting(f"megatron predicting{name}", number)
    saved = replace(saved, plan=replace(saved.plan, recompute=Recompute.FULL))
    counted = counted_head(saved)
    shape = BlockShape.of(saved.job, saved.plan, saved.stack)
    walked = walk(shape, HEAD, ending=BorderGradients(keeps_gradients=False))
    found, buffer = as_measured(walked), BlockMemory.of(walked).buffer
    # The scale of a softmax is recomputed, too.
    kept = kept_of_losses(saved, number) - number * SCALE_BYTES
    assert counted.saved_bytes == found.saved_bytes + buffer + kept
    tokens = saved.plan.microbatch_size * saved.job.seq_len
    beyond = counted.backward_peak_bytes - found.backward_peak_bytes - buffer
    assert 0 <= beyond < SHIFTED_BYTES * tokens


@pytest.mark.parametrize(("cp", "rank"), [(2, 0), (2, 1), (4, 0), (4, 1), (4, 3)])
def test_megatron_core_sends_as_many_tokens_to_ranks_that_share_sequences(
    cp: int, rank: int
) -> None:
    """In `roll_tensor`, to the neighbours that a rank has: ids, positions, labels and masks."""
    saved = predicting("megatron predicting", 2)
    plan = replace(saved.plan, cp=cp, dp=1, dp_shard=1, attention=Attention.FLASH)
    saved = replace(saved, plan=plan, job=replace(saved.job, global_batch_size=1))
    of_step = Counter(messages(predict_members(saved, [rank])[rank].collectives))
    counted = Counter(messages(counted_head(saved, rank).forward_calls))
    neighbours = 1 + (0 < rank < cp - 1)
    assert counted == {way: neighbours * 2 * number for way, number in SHIFTED.items()}
    assert counted == {way: of_step[way] for way in SHIFTED}


def messages(calls: Iterable[CollectiveCount]) -> dict[tuple[str, int], int]:
    """Return how many there are of each kind and size."""
    return {(each.op, each.size_bytes): each.num_calls for each in calls if each.op in WAYS}


@pytest.mark.parametrize("number", [1, 2])
def test_megatron_core_counts_as_many_parameters(number: int) -> None:
    """Its vocabulary of 4,000 is padded to 4,096."""
    saved = predicting("megatron predicting", number)
    with megatron_job.built(saved) as job:
        gpt = job._chunks[0].module.module
        counted = sum(each.numel() for each in gpt.parameters())
    padding = 2 * 96 * saved.job.transformer.hidden_size
    assert counted == count_parameters(saved.job.model) + padding
