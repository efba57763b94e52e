"""Results of a run: statistics, timeline, capacity, page, tables. Imports nothing else of `sim`."""
