"""The step loop around a scheduler and an executor, and what builds both from options."""
