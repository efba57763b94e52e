"""Benchmarks. Each prints a table, then one JSON line last."""
