"""The demo server under load: `python -m bench.server`, and what else is measured of it."""
