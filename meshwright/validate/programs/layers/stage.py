"""One virtual stage of a transformer: its layers, and the ends of the model that it holds."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.hwprofiles import Recompute
from meshwright.simulator import ModelSpec
from meshwright.validate.programs.fused import angle_table
from meshwright.validate.programs.layers.predictions import FurtherLosses, Predictions
from meshwright.validate.programs.layers.transformer import (
    ROTARY_BASE,
    LayerOptions,
    Parts,
    TransformerLayer,
)


class Ends(NamedTuple):
    """What a stage holds beside layers; ``predictions`` are ahead of the head, or of its stage.

    A stage has so many ``idle_angles`` besides, which nothing reads.
    """

    embedding: bool
    head: bool
    predictions: bool = False
    idle_angles: int = 0


class VirtualStage(nn.Module):
    """Consecutive layers, with the embedding before the first and the head after the last.

    The final norm is behind the last layer, wherever the head is, if others behind it predict
    further tokens.

    Args:
        model: Whose layers.
        layers: Which, counted from 0 in the whole model.
        options: Switches of every layer.
        parts: What the stack makes layers of.
        ends: What it holds beside them.
    """

    def __init__(
        self, model: ModelSpec, layers: range, options: LayerOptions, parts: Parts, ends: Ends
    ) -> None:
        super().__init__()
        self.embedding = parts.embedding(model) if ends.embedding else None
        kinds = [run.kind for run in model.layer_runs for _ in range(run.num_blocks)]
        self.layers = nn.ModuleDict(
            {str(index): TransformerLayer(model, options, parts, kinds[index]) for index in layers}
        )
        predicts = model.prediction_layers > 0
        has_norm = predicts and model.num_layers - 1 in layers
        self.norm = parts.norm(model, model.hidden_size) if has_norm else None
        self.predictions = (
            Predictions(model, options, parts, self.embedding) if ends.predictions else None
        )
        losses = FurtherLosses(model, options, parts) if predicts and ends.head else None
        self.head = parts.head(model, losses) if ends.head else None
        self.losses = losses
        self.copies = not (layers or ends.embedding) and (predicts or not ends.head)
        self.recomputes = options.recompute is Recompute.FULL
        self.is_reentrant = parts.is_reentrant
        self.place = (parts.starts, model.head_dim, ROTARY_BASE) if parts.casts_angles else None
        self.table: Tensor | None = None
        self.num_idle_angles = ends.idle_angles
        self.idle_angles: Tensor | None = None

    def forward(self, inputs: Tensor, *read: Tensor) -> Tensor:
        """Return activations of token ids or activations; logits where the head is.

        What predicts further tokens has *read* ids, the losses of these targets.
        """
        if self.num_idle_angles and self.idle_angles is None:
            self.idle_angles = inputs.new_empty(self.num_idle_angles, dtype=torch.float32)
        hidden = inputs if self.embedding is None else self.embedding(inputs)
        if self.copies:  # what a block gives is another tensor than what it received
            hidden = hidden.clone()
        for layer in self.layers.values():
            given = (hidden, *self._angles(hidden))
            if self.recomputes and self.training:
                hidden = checkpoint(layer, *given, use_reentrant=self.is_reentrant)
            else:
                hidden = layer(*given)
            del given
        if self.norm is not None:
            hidden = self.norm(hidden)
        if self.predictions is not None:
            hidden = self.predictions(hidden, read[0])
        if self.head is None:
            return hidden
        out: Tensor = self.head(hidden, *(() if self.losses is None else read[1:]))
        return out

    def _angles(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return a layer's copy of the table of angles, ahead of its checkpoint, if it gets one."""
        if self.place is None:
            return ()
        if self.table is None:
            self.table = angle_table(hidden.shape[1], *self.place, hidden.device)
        return (self.table.to(hidden.dtype),)

    def loss_is_made(self) -> None:
        """Let go what was held beside the logits."""
        if self.losses is not None:
            self.losses.last_logits = None
