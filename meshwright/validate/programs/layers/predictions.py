"""MTP (multi-token prediction) layers, between the final norm and the logits."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.hwprofiles import Recompute
from meshwright.simulator import ModelSpec
from meshwright.validate.programs.fused import AutogradFunction, Context
from meshwright.validate.programs.layers.transformer import LayerOptions, Parts, TransformerLayer

LOSS_SCALE = 0.1  # mtp_loss_scaling_factor of Megatron-Core's TransformerConfig (core 0.16)


class _WithLoss(AutogradFunction):
    """Return activations unchanged; backward adds that of a loss with a weight of its own.

    So MTPLossAutoScaler does (megatron/core/transformer/multi_token_prediction.py, core 0.16).
    """

    @staticmethod
    def forward(ctx: Context, hidden: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.slope = torch.full_like(loss, weight)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, ctx.slope, None


class MtpLayer(nn.Module):
    """MTP layer: reads hidden states and the embeddings of the tokens that follow.

    DeepSeek-V3, arXiv 2412.19437, 2.2; names as in Megatron-Core's MultiTokenPredictionLayer.
    """

    def __init__(self, model: ModelSpec, options: LayerOptions, parts: Parts) -> None:
        super().__init__()
        width = model.hidden_size
        self.enorm = parts.norm(model, width)
        self.hnorm = parts.norm(model, width)
        self.eh_proj = parts.column_linear(2 * width, width, bias=False)
        self.layer = TransformerLayer(model, options, parts, model.layer_runs[-1].kind)
        self.prediction_norm = parts.norm(model, width)
        self.gathered = parts.gathered_columns

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Return the activations after the layer."""
        both = torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1)
        out: Tensor = self.prediction_norm(self.layer(self.gathered(self.eh_proj(both))))
        return out


class Predictions(nn.Module):
    """MTP layers of a model.

    Args:
        model: Model.
        options: Options of every layer.
        parts: The stack's parts.
        embedding: Of the model, where it is on the same stage; else a copy is made.
    """

    def __init__(
        self, model: ModelSpec, options: LayerOptions, parts: Parts, embedding: nn.Module | None
    ) -> None:
        super().__init__()
        self.embedding = parts.embedding(model) if embedding is None else embedding
        number = range(model.prediction_layers)
        self.layers = nn.ModuleList(MtpLayer(model, options, parts) for _ in number)
        self.shifted = parts.shifted
        self.recomputes, self.is_reentrant = (
            options.recompute is Recompute.FULL,
            parts.is_reentrant,
        )

    def forward(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return normalised activations, with the output of each MTP layer behind them.

        Args:
            hidden: Normalised activations.
            ids: ``[batch, tokens]`` that they were made of.
        """
        # Shifted as in Megatron-Core, which sends them between ranks that share sequences; nothing
        # reads them: angles do not depend on them.
        places, streams = torch.zeros_like(ids), [hidden]
        for layer in self.layers:
            ids, places = self.shifted(ids), self.shifted(places)
            embedded = self.embedding(ids)
            if self.recomputes and self.training:
                made = checkpoint(layer, streams[-1], embedded, use_reentrant=self.is_reentrant)
            else:
                made = layer(streams[-1], embedded)
            del embedded
            streams.append(made)
        return torch.cat(streams)


class MtpLosses(nn.Module):
    """Losses of the MTP layers.

    Args:
        model: Model.
        options: Options of every layer.
        parts: The stack's parts.
    """

    def __init__(self, model: ModelSpec, options: LayerOptions, parts: Parts) -> None:
        super().__init__()
        self.number = model.prediction_layers
        self.weight = LOSS_SCALE / self.number / options.num_microbatches
        # In Megatron-Core a local name beside those that the loss of the next tokens is made of.
        self.last_logits: Tensor | None = None
        self.loss, self.shifted = parts.leading_tokens_loss, parts.shifted

    def forward(
        self, streams: Tensor, targets: Tensor, logits_of: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the first of *streams*, whose backward runs that of the MTP losses, too.

        Args:
            streams: Of `Predictions`.
            targets: The tokens that follow those of the first stream.
            logits_of: The output matrix.
        """
        mask = torch.ones_like(targets, dtype=torch.float32)  # which are scored is known
        main, *mtp_streams = streams.chunk(1 + self.number)
        for number, each in enumerate(mtp_streams, 1):
            targets, mask = self.shifted(targets), self.shifted(mask)
            logits = logits_of(each)
            loss = self.loss(logits, targets, number)
            main = _WithLoss.apply(main, loss, self.weight)
        self.last_logits = logits
        return main
