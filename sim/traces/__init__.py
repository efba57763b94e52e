"""Traces of requests: readers of what others publish, statistics, and changes to them."""
