"""Results of a run: percentiles, timeline, capacity, page, tables. Imports nothing else of `sim`."""
