"""cbatch and other engines on the same weights, in turns, each in a process of its own."""
