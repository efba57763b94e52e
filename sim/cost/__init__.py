"""What a step costs: measured, modelled by a roofline, or looked up in tables."""
