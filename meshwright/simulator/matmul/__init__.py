"""Distributed matrix products: SBP signatures, redistribution (boxing) and chains."""

from meshwright.simulator.matmul.boxing import Boxing, DeviceMesh, TensorSize, boxing
from meshwright.simulator.matmul.chains import Chain, LocalRun, best_chain, local_run
from meshwright.simulator.matmul.signatures import (
    REPLICATED,
    PlacedOperator,
    Shape,
    Signature,
    matmul,
)

__all__ = [
    "REPLICATED",
    "Boxing",
    "Chain",
    "DeviceMesh",
    "LocalRun",
    "PlacedOperator",
    "Shape",
    "Signature",
    "TensorSize",
    "best_chain",
    "boxing",
    "local_run",
    "matmul",
]
