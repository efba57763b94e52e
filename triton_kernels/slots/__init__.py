"""The state of running sequences on the device, and the kernels that read and update it.

`state` allocates it and applies changes. `draft_batch` and `target_batch` lay out the passes of
draft and target for a plan. `guesses` takes drafts from lookups on the host. `advance` applies the
results of a step. The reference is the bookkeeping of `cbatch.runtime.cpu.executor`: tests compare
whole steps.
"""
