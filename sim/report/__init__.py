"""What a simulation came to: percentiles, timeline, page. Imports nothing of the simulator's."""
