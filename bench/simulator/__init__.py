"""The simulator: its speed, `python -m bench.simulator`, and how near it comes to real engines."""
