"""Drafters with a model, small or a head, on a CPU."""
