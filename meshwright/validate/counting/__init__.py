"""What one rank of a PyTorch program computes, sends and holds, counted exactly."""

from meshwright.validate.counting.absent_ranks import fake_ranks
from meshwright.validate.counting.accelerator import stand_in
from meshwright.validate.counting.fake_cluster import fake_cluster
from meshwright.validate.counting.oracle import RankOracle

__all__ = [
    "RankOracle",
    "fake_cluster",
    "fake_ranks",
    "stand_in",
]
