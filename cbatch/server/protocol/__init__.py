"""Bodies of API requests and responses as typed values, with their checks. Imports nothing else of
the server."""
