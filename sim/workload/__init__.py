"""Workloads: recorded traces, synthetic requests, arrival times. The load tester uses them too."""
