"""The recipe of the demo pair in `cbatch/demo`."""
