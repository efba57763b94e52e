"""transformers' modelling code over a ragged batch and paged KV, on any device."""
