"""Sections of the GPU run with interpreted kernels, in a process of their own:

TRITON_INTERPRET=1 python -m pytest tests/bench/interpreted
"""

from __future__ import annotations

from tests.triton_kernels.interpreter.quick import interpret

if not interpret():
    collect_ignore_glob = ["test_*.py"]
