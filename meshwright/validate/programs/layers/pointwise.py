"""Modules without weights that are one kernel."""

from torch import Tensor, nn

from meshwright.validate.programs.fused import (
    FusedSquaredRelu,
    PackedSwiglu,
    UnweightedRmsNorm,
)

NORM_EPSILON = 1e-5


class UnweightedNorm(nn.Module):
    """RMS norm without weights; keeps its input and one statistic a head."""

    def forward(self, values: Tensor) -> Tensor:
        """Return the normalised values."""
        out: Tensor = UnweightedRmsNorm.apply(values, NORM_EPSILON)
        return out


class SquaredRelu(nn.Module):
    """The square of ReLU in one kernel."""

    def forward(self, values: Tensor) -> Tensor:
        """Return the activated values."""
        out: Tensor = FusedSquaredRelu.apply(values)
        return out


class GatedSilu(nn.Module):
    """SiLU gate times value of a packed tensor; keeps it."""

    def forward(self, packed: Tensor) -> Tensor:
        """Return the activated values."""
        out: Tensor = PackedSwiglu.apply(packed)
        return out
