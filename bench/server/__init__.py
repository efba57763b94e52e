"""The demo server under load: `python -m bench.server`, and the overhead of the server itself."""
