"""Kernel families of cbatch: a folder each, with typed launchers and plain-torch references.

Not for GPUs alone: `verification.reference` accepts and rejects drafts on a CPU as well
(`cbatch/runtime/cpu/verify.py`).

This top-level name shadows another package of the same name; the two cannot share an environment.
"""
