"""A call from its ticket of the queue to its answer, without HTTP. Imports `protocol`."""
