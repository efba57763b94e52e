"""Requests to replay, generated or from a trace, in order of arrival."""
