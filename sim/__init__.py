"""The simulator: cbatch's own scheduler over a clock of costs. Imports `cbatch`, never `bench`."""
