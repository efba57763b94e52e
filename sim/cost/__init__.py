"""Cost models: the time of a step, from measurements, a roofline or tables."""
