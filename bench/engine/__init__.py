"""The engine alone: `python -m bench.engine`."""
