"""The commands: generate, demo, serve."""
