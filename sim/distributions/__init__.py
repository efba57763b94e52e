"""Distributions of arrivals and of lengths. Imports nothing."""
