"""Kernel families of cbatch: one file each, with a typed launcher and a plain-torch reference.

This top-level name shadows another package of the same name; the two cannot share an environment.
"""
