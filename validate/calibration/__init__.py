"""Micro-benchmarks of a machine, and the device and cluster profiles made of them."""
