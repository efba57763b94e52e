"""Attention over paged KV on CPUs, by torch. Imports `model`."""
