"""Training of heads: drafters that read a model's hidden states, for any model cbatch serves."""
