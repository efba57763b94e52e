"""Tests that run kernels in Triton's interpreter.

Whether a kernel is interpreted is settled when triton is imported, for the whole process, and the
rest of the suite needs it compiled. So this folder runs in a process of its own: that of
`tests/triton_kernels/test_interpreter.py`, or

    TRITON_INTERPRET=1 python -m pytest tests/triton_kernels/interpreter
"""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton_kernels.build import interpreter

    interpreter.repair()
else:
    collect_ignore_glob = ["test_*.py"]
