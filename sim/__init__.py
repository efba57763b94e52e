"""The simulator: a virtual clock, an executor without a model, and what is built on the two."""
