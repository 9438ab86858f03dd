"""What one rank of a PyTorch program computes, sends and holds, counted exactly."""
