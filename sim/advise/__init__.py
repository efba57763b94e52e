"""Counterfactuals of a recorded run: `cbatch advise`. Imports all of `sim`, and `cbatch.rerun`."""
