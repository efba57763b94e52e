"""Workloads: traces of requests, made-up requests, and when each arrives. The load tester uses them
too."""
