"""The OpenAI-compatible server: `http` imports `serving`, which imports `protocol`."""
