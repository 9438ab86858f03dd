"""Whole steps of small models on this machine beside their predictions."""
