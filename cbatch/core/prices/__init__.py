"""The cost model of a step: its composition, its measured durations, and its prices."""
