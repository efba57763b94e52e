"""Measures steps of an executor: a short plan at start-up, a long one for `cbatch calibrate`."""
