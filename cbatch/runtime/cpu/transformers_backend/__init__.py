"""Decoders of transformers' modelling code, with our attention over paged KV."""
