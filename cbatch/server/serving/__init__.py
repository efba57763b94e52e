"""An API request from its place in the queue to its response, without HTTP. Imports `protocol`."""
