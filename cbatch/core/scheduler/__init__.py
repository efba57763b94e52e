"""The scheduler: queue, KV blocks, plan and commit of steps. Imports the other parts of `core`."""
