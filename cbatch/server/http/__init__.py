"""Routes, connections, keys and pages: everything about HTTP. Imports `serving` and `protocol`."""
