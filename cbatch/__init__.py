"""A serving engine for language models with per-slot speculative lookahead."""
