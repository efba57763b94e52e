"""This engine beside others on the same weights, in turns, each in a process of its own."""
