"""The simulator: its speed (`python -m bench.simulator`), and its accuracy against real engines."""
