"""Logits processors, grammars, log probabilities and rejection sampling. Imports `model`."""
