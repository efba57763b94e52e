"""Drafters on a CPU that run a small model or a head."""
