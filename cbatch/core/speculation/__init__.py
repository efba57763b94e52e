"""Policies that choose how many tokens each row drafts. Imports `prices` and `request`."""
