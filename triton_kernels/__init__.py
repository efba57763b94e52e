"""Kernel families of cbatch: a folder each, with typed launchers.

This top-level name shadows another package of the same name; the two cannot share an environment.
"""
