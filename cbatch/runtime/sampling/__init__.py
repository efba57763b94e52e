"""From logits to what may be sampled: penalties, grammars, log probabilities. Imports `model`."""
