"""Config, weights and KV cache of a model, for any device. Imports nothing else of `runtime`."""
