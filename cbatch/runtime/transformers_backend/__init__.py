"""transformers' modelling code over a flat batch and paged KV, on any device."""
