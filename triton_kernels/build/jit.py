"""`jit`: Triton's decorator, for kernels whose cache keys are equal in every process.

Before Triton 3.9 the constants of a callee enter a caller's key only if the callee's key was
computed earlier in the process (triton-lang/triton#10494). A process that compiles ahead computes
keys in another order than the process that launches, which would then compile again. Here a
callee's key is computed before it is merged, as Triton does from 3.9 on.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.runtime.jit import DependenciesFinder

__all__ = ["jit"]

jit = triton.jit


def _merge_settled_keys() -> None:
    merge = DependenciesFinder._update_hash

    def merge_settled(self: DependenciesFinder, callee: Any) -> None:
        callee.cache_key  # noqa: B018
        merge(self, callee)

    DependenciesFinder._update_hash = merge_settled


if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
    _merge_settled_keys()
