"""Small kernels of a decoder layer: norm, activation, KV write."""
