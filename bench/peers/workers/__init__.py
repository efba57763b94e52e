"""One process per system, under the Python that has it. cbatch need not be installed there."""
