"""From shapes to operators: what one microbatch runs in an embedding and in a head.

Element-wise traffic is counted as in a layer.
"""

from meshwright.hwprofiles import CollectiveOp
from meshwright.simulator.blocks.layer import (
    accumulation,
    column_backward,
    norm_reductions,
    pair_communication,
    tp_collective,
)
from meshwright.simulator.blocks.operators import (
    BlockOperators,
    Collective,
    Gemm,
    KernelLaunches,
    MemoryBound,
    Operator,
    gemm_backward,
)
from meshwright.simulator.blocks.shape import BlockShape
from meshwright.simulator.layout import (
    Axis,
    PairCommunication,
    Replicate,
    linear_pair_communication,
)

# Kernels of an embedding and of a head beside their products: index, add, dropout;
# norm, cast, maximum, subtract, exponent, sum, divide and their gradients.
EMBEDDING_KERNELS = 3
HEAD_KERNELS = 8
# Bytes a logit moves in the loss: unfused chain of fp32 kernels (cast 2 + 4, maximum 4,
# subtract 8, exponent 8, sum 4, divide 8; gradient 8 + cast 6) or one fused kernel.
LOSS_BYTES_UNFUSED = (38, 14)
LOSS_BYTES_FUSED = (6, 10)
# Kernels that BERT's head runs more: dense layer, activation; pooler, tanh, classifier.
MLM_KERNELS = 5


def embedding_operators(shape: BlockShape) -> BlockOperators:
    """Return the operators of the embedding: a vocabulary-parallel look-up.

    Each rank looks up its rows and the results are summed, a partial placement that becomes
    the placement of the activations.  Backward writes a dense gradient of the whole table.
    """
    comm = pair_communication(shape)
    model = shape.model
    added = (model.positions == "learned") + (model.token_types > 0)
    values = 2 + 2 * added + 2 * model.embedding_norm
    element = shape.num_local_tokens * model.hidden_size
    traffic = element * (values * shape.element_bytes + 3 * model.dropout)
    table = shape.local_vocab_size * model.hidden_size
    return BlockOperators(
        forward=(
            MemoryBound("embedding", traffic),
            *_looked_up(shape, comm),
            KernelLaunches("embedding forward", EMBEDDING_KERNELS),
        ),
        backward=(
            *tp_collective(shape, comm.backward_out, "tp embedding gather"),
            MemoryBound("embedding gradient", traffic),
            MemoryBound("embedding table gradient", 8 * table),
            *_position_reduction(shape),
            KernelLaunches("embedding backward", EMBEDDING_KERNELS),
        ),
    )


def _looked_up(shape: BlockShape, comm: PairCommunication) -> tuple[Operator, ...]:
    """Return the sum of looked-up tokens over the ranks, each of which has some of the rows.

    Where a learned position is added to all tokens, Megatron-LM sums all and then keeps its own.
    """
    keeps_all = shape.model.positions == "learned" and not shape.stack.scatters_positions
    if keeps_all:
        comm = linear_pair_communication(activations=Replicate())
    return tp_collective(shape, comm.forward_out, "tp embedding reduce")


def _position_reduction(shape: BlockShape) -> tuple[Operator, ...]:
    """Return the sum of the position table's gradient where a rank saw its own tokens alone."""
    scattered = shape.sequence_parallel and shape.stack.scatters_positions
    scattered = scattered and not shape.defers_sums
    if shape.model.positions != "learned" or not scattered:
        return ()
    size_bytes = shape.model.max_positions * shape.model.hidden_size * shape.element_bytes
    return (Collective("tp position reduce", CollectiveOp.ALL_REDUCE, size_bytes, Axis.TP),)


def head_operators(shape: BlockShape) -> BlockOperators:
    """Return the operators of the head: BERT's dense layer, norm, logits and cross-entropy.

    Only scored positions reach it; the collectives around it carry all.
    """
    comm = pair_communication(shape)
    dense = _mlm_dense(shape) if shape.model.mlm_head else BlockOperators(forward=(), backward=())
    model, tokens = shape.model, shape.num_scored_tokens
    logits = Gemm("logits", m=tokens, n=shape.local_vocab_size, k=model.hidden_size)
    loss = LOSS_BYTES_FUSED if shape.stack.fused_loss else LOSS_BYTES_UNFUSED
    num_logits = tokens * shape.local_vocab_size
    norm = shape.num_local_scored_tokens * model.hidden_size * shape.element_bytes
    scalars = _loss_collectives(shape) if shape.tp > 1 else ()
    return BlockOperators(
        forward=(
            *dense.forward,
            MemoryBound("final norm", 2 * norm),
            *tp_collective(shape, comm.forward_in, "tp forward gather"),
            logits,
            MemoryBound("loss", num_logits * loss[0]),
            *scalars,
            KernelLaunches("head forward", HEAD_KERNELS),
        ),
        backward=(
            MemoryBound("loss gradient", num_logits * loss[1]),
            *column_backward(shape, comm, logits),
            MemoryBound("final norm gradient", 5 * norm),
            *norm_reductions(shape, 1),
            *dense.backward,
            accumulation(shape, shape.local_vocab_size * model.hidden_size),
            KernelLaunches("head backward", HEAD_KERNELS),
        ),
    )


def _loss_collectives(shape: BlockShape) -> tuple[Operator, ...]:
    """Return the collectives of a vocabulary-parallel cross-entropy: maximum, target logit, sum.

    One fp32 a token each: three reductions, or fused (Transformer Engine's parallel cross
    entropy) one gather of all three from every rank.
    """
    numbers = 4 * shape.num_scored_tokens
    if shape.stack.fused_loss:
        size_bytes = 3 * numbers * shape.tp
        return (Collective("tp loss gather", CollectiveOp.ALL_GATHER, size_bytes, Axis.TP),)
    return (Collective("tp loss reduce", CollectiveOp.ALL_REDUCE, numbers, Axis.TP),) * 3


def _mlm_dense(shape: BlockShape) -> BlockOperators:
    """Return what BERT's head runs more: a dense layer on scored tokens, the pooler on the first.

    Every tensor-parallel rank computes both in full.  An activation reads and writes a value;
    backward moves three and one for its bias, and reads the logit gradients for theirs.  The
    pooler has so few rows that reading its matrix, and writing the gradient, is its time.
    """
    hidden, tokens = shape.model.hidden_size, shape.num_local_scored_tokens
    dense = Gemm("mlm dense", m=tokens, n=hidden, k=hidden)
    pooler = hidden**2 * shape.element_bytes
    value = tokens * hidden * shape.element_bytes
    logits = shape.num_scored_tokens * shape.local_vocab_size * shape.element_bytes
    return BlockOperators(
        forward=(
            dense,
            MemoryBound("mlm activation", 2 * value),
            MemoryBound("pooler", pooler),
            KernelLaunches("mlm forward", MLM_KERNELS),
        ),
        backward=(
            MemoryBound("output bias gradient", logits),
            MemoryBound("mlm activation gradient", 4 * value),
            *gemm_backward(dense),
            MemoryBound("pooler gradient", 2 * pooler),
            accumulation(shape, 2 * hidden**2),
            KernelLaunches("mlm backward", MLM_KERNELS),
        ),
    )
