"""Attention over paged KV on a processor. Imports `model`."""
