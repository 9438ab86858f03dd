"""Virtual stage of a transformer: its layers, and the embedding and head that it holds."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.hwprofiles import Recompute
from meshwright.simulator import ModelSpec
from meshwright.validate.programs.fused import rope_cache
from meshwright.validate.programs.layers.predictions import MtpLosses, Predictions
from meshwright.validate.programs.layers.transformer import (
    ROTARY_BASE,
    LayerOptions,
    Parts,
    TransformerLayer,
)


class Ends(NamedTuple):
    """Parts of a stage beside its layers; ``predictions`` are MTP layers ahead of the head.

    ``idle_rope_elements`` are elements of a RoPE cache that nothing reads.
    """

    embedding: bool
    head: bool
    predictions: bool = False
    idle_rope_elements: int = 0


class VirtualStage(nn.Module):
    """Consecutive layers, with the embedding before the first and the head after the last.

    The final norm is behind the last layer, wherever the head is, if MTP layers are behind
    it.

    Args:
        model: Model of the layers.
        layers: Indices of its layers, from 0 in the whole model.
        options: Options of every layer.
        parts: The stack's parts.
        ends: Embedding, head and MTP layers that it holds.
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
        losses = MtpLosses(model, options, parts) if predicts and ends.head else None
        self.head = parts.head(model, losses) if ends.head else None
        self.losses = losses
        self.copies = not (layers or ends.embedding) and (predicts or not ends.head)
        self.recomputes = options.recompute is Recompute.FULL
        self.is_reentrant = parts.is_reentrant
        self.place = (parts.starts, model.head_dim, ROTARY_BASE) if parts.casts_rope_cache else None
        self.table: Tensor | None = None
        self.num_idle_rope_elements = ends.idle_rope_elements
        self.idle_rope_elements: Tensor | None = None

    def forward(self, inputs: Tensor, *read: Tensor) -> Tensor:
        """Return activations of token ids or activations; logits where the head is.

        MTP layers have *read* token ids, their losses targets.
        """
        if self.num_idle_rope_elements and self.idle_rope_elements is None:
            self.idle_rope_elements = inputs.new_empty(
                self.num_idle_rope_elements, dtype=torch.float32
            )
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
        """Return a layer's cast of the RoPE cache, ahead of its checkpoint, if it gets one."""
        if self.place is None:
            return ()
        if self.table is None:
            self.table = rope_cache(hidden.shape[1], *self.place, hidden.device)
        return (self.table.to(hidden.dtype),)

    def free_mtp_logits(self) -> None:
        """Free the logits of the last MTP loss."""
        if self.losses is not None:
            self.losses.last_logits = None
