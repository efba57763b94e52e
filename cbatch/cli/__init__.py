"""The `cbatch` command, and its subcommands generate, serve, demo and calibrate."""
