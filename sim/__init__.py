"""The simulator: cbatch's own scheduler on a virtual clock. It imports `cbatch`, never `bench`."""
