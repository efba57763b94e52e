"""This engine beside others on the same weights, in turns, in one process."""
