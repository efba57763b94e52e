"""Tensor parallelism: ranks that run every step together, each on its share of the model."""
