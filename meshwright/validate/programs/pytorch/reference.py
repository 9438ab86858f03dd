"""Model trained by one process without parallelism: the reference for every layout's losses."""

from torch.optim import Optimizer

from meshwright.hwprofiles import Attention, Recompute
from meshwright.simulator import TrainingJob
from meshwright.simulator.model import has_mtp_layers, padded_vocab_size
from meshwright.validate.programs.contract import token_batch
from meshwright.validate.programs.experts import update_routing_biases
from meshwright.validate.programs.layers import Ends, LayerOptions, VirtualStage
from meshwright.validate.programs.pytorch.loss import token_loss
from meshwright.validate.programs.pytorch.optimizer import (
    clip_gradients,
    local_gradients,
    make_optimizer,
)
from meshwright.validate.programs.pytorch.parts import initialise_whole, plain_parts, tie_embeddings
from meshwright.validate.programs.pytorch.precision import autocast


def reference_losses(
    job: TrainingJob,
    num_steps: int,
    dropout: float = 0.0,
    *,
    vocabulary_multiple: int = 1,
    of_transformers: bool = False,
) -> list[float]:
    """Return the mean loss of each of the first *num_steps* steps, one sequence at a time.

    Weights are fp32; a 16-bit job computes under autocast. Agrees with another layout where that
    needs no more padding of the vocabulary than one rank does.

    Args:
        job: Training job.
        num_steps: Number of steps.
        dropout: Probability, where the model has dropout.
        vocabulary_multiple: To which the embedding is padded.
        of_transformers: Experts are chosen and weighed, and heads normed, as transformers does it.
    """
    model = job.transformer
    num_rows = padded_vocab_size(model, 1, vocabulary_multiple)
    parts = plain_parts(model, vocab_size=num_rows, dropout=dropout)
    parts.of_transformers = of_transformers
    # Others norm heads before RoPE, and so those of layers without RoPE.
    parts.norms_after_rope = of_transformers
    options = LayerOptions(
        attention=Attention.FLASH,
        recompute=Recompute.NONE,
        dropout=parts.dropout,
        num_microbatches=job.global_batch_size,
    )
    layers = range(model.num_layers)
    stage = VirtualStage(
        model,
        layers,
        options,
        parts,
        Ends(embedding=True, head=True, predictions=has_mtp_layers(model)),
    )
    if model.tied_embeddings:
        tie_embeddings(stage)
    # Rows that no token has are weights as others are, in Megatron's tables, too: they have logits.
    initialise_whole(stage, model.model_copy(update={"vocab_size": num_rows}))
    optimizer = make_optimizer(stage.parameters())
    return [_step(stage, optimizer, job, step) for step in range(num_steps)]


def _step(stage: VirtualStage, optimizer: Optimizer, job: TrainingJob, step: int) -> float:
    total = 0.0
    for sequence in range(job.global_batch_size):
        tokens, targets = token_batch(job, step, range(sequence, sequence + 1))
        with autocast(job.precision, "cpu"):
            loss = token_loss(stage(tokens, tokens, targets), targets) / job.global_batch_size
        loss.backward()
        total += loss.item()
    clip_gradients(local_gradients(stage.parameters()), [], None)
    update_routing_biases([stage], None)
    optimizer.step()
    optimizer.zero_grad()
    return total
