"""Results of a run: percentiles, timeline, page. Imports nothing else of the simulator."""
