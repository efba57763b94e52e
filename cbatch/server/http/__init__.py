"""Routes, connections, keys and pages: all that knows HTTP. Imports `serving` and `protocol`."""
