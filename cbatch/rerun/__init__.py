"""Reruns of drafters over recorded texts, and prices of recorded steps. Imports `engine`."""
