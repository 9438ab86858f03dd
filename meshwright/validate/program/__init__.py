"""From a plan to the PyTorch program that its stack stands for."""
