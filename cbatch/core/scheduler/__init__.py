"""Which rows a step has: queue, blocks, plan and commit. Imports `speculation` and `request`."""
