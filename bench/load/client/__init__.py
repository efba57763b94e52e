"""A single call: request body, HTTP, parsing of the response. Imports no other part of the load
tester."""
