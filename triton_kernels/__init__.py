"""Triton kernels of cbatch: one folder for each family, with typed launchers.

This top-level name shadows another package of the same name; the two cannot share an environment.
"""
