"""Which rows a step has: queue, blocks, plan and commit. Imports the other parts of `core`."""
