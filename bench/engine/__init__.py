"""The engine alone: `python -m bench.engine`, and how well it drafts."""
