"""Recording and replay of every input of a scheduler. Imports `core`."""
