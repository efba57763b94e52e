"""The fast executor: answers plans from a cost model and an acceptance model."""
