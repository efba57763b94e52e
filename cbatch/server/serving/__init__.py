"""Handling of API requests from queue to response, without HTTP. Imports `protocol`."""
