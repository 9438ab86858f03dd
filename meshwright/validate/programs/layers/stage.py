"""One virtual stage of a transformer: its layers, and the ends of the model that it holds."""

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.hwprofiles import Recompute
from meshwright.simulator import ModelSpec
from meshwright.validate.programs.layers.predictions import Predictions
from meshwright.validate.programs.layers.transformer import LayerOptions, Parts, TransformerLayer


class VirtualStage(nn.Module):
    """Consecutive layers, with the embedding before the first and the head after the last.

    Args:
        model: Whose layers.
        layers: Which, counted from 0 in the whole model.
        options: Switches of every layer.
        parts: What the stack makes layers of.
    """

    predictions: Predictions | None

    def __init__(
        self,
        model: ModelSpec,
        layers: range,
        options: LayerOptions,
        parts: Parts,
        *,
        has_embedding: bool,
        has_head: bool,
    ) -> None:
        super().__init__()
        self.embedding = parts.embedding(model) if has_embedding else None
        kinds = [run.kind for run in model.layer_runs for _ in range(run.num_blocks)]
        self.layers = nn.ModuleDict(
            {str(index): TransformerLayer(model, options, parts, kinds[index]) for index in layers}
        )
        predictions = None
        if has_head and model.prediction_layers:
            predictions = Predictions(model, options, parts, self.embedding)
        self.head = parts.head(model, predictions) if has_head else None
        self.__dict__["predictions"] = predictions  # a module of the head, not of the stage
        self.recomputes = options.recompute is Recompute.FULL
        self.is_reentrant = parts.is_reentrant

    def forward(self, inputs: Tensor, *read: Tensor) -> Tensor:
        """Return activations of token ids or activations; logits where the head is.

        A head that predicts further tokens has *read* ids and targets.
        """
        hidden = inputs if self.embedding is None else self.embedding(inputs)
        if not self.layers and self.embedding is self.head is None:
            return hidden.clone()  # what a stage sends is another tensor than what it received
        for layer in self.layers.values():
            if self.recomputes and self.training:
                hidden = checkpoint(layer, hidden, use_reentrant=self.is_reentrant)
            else:
                hidden = layer(hidden)
        if self.head is None:
            return hidden
        out: Tensor = self.head(hidden, *(() if self.predictions is None else read))
        return out

    def loss_is_made(self) -> None:
        """Let go what was held beside the logits."""
        if self.predictions is not None:
            self.predictions.last_logits = None
