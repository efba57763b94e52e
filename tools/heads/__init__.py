"""Training of drafters that read a model's states, for any model that is served."""
