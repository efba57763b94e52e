"""Prices of steps: what a step is made of, its duration, and prices fitted to such samples."""
