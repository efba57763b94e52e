"""Traces of requests: readers of public formats, statistics, and changes."""
