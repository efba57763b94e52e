"""Requests, their sampling parameters and their sampling noise. Imports no other folder."""
