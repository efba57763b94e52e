"""The `cbatch` command, and its subcommands get, generate, chat, serve, demo and calibrate."""
