"""Models, paged KV and the torch executor: the half of cbatch that knows torch."""
