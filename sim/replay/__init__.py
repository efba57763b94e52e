"""Requests through one scheduler or many, on a clock of its own."""
