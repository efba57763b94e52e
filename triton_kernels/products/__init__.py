"""Products with weights whose rows keep their bits, whoever shares the step."""
