"""A process for each system, in the Python that has it: nothing of ours is needed there."""
