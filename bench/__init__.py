"""Benchmarks, each a command: `bench/README.md` lists them. Imports anything; nothing imports
it."""
