"""Requests to replay: generated, or of a trace, in the order they come."""
