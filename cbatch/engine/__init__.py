"""The step loop around a scheduler and an executor, and the log of what went into the scheduler."""
