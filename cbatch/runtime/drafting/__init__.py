"""Drafters: a draft model, heads, lookups, and chains of these. Imports `cpu`."""
