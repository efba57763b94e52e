"""Sections of the GPU run with interpreted kernels, in a process of their own:

TRITON_INTERPRET=1 python -m pytest tests/bench/interpreted
"""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.triton_kernels.interpreter.quick import reuse_types
    from triton_kernels.build import interpreter

    interpreter.repair()
    reuse_types()
else:
    collect_ignore_glob = ["test_*.py"]
