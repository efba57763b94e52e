"""Measurement of an executor's steps, briefly at start-up, thoroughly for `cbatch calibrate`, and
the fit of prices to the measured times."""
