"""Proofs with interpreted kernels: every launch of these tests is audited.

Whether a kernel is interpreted is decided when triton is imported, so this folder runs in a process
of its own: `make prove-gpu`, or

    TRITON_INTERPRET=1 python -m pytest tests/gpu_proofs/interpreted
"""

from __future__ import annotations

from tests.triton_kernels.interpreter.quick import interpret

if not interpret():
    collect_ignore_glob = ["test_*.py"]
