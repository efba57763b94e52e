"""Results of a run: percentiles, timeline, capacity, page and tables. Imports no other part."""
