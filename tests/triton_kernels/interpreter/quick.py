"""Cached types of Triton's language: the interpreter creates each of them again for every
operation, which takes a third of its time."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.interpreter import interpreter_builder


def interpret() -> bool:
    """Prepare this process for interpreted kernels; return False where they are compiled."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return False
    from tests.triton_kernels.interpreter.patches import patch

    patch()
    reuse_types()
    return True


def without_overflow_checks(patch: pytest.MonkeyPatch) -> None:
    """Skip overflow checks after each sum, which take a third of the time."""
    options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)
    patch.setattr(interpreter_builder, "options", options)


def reuse_types() -> None:
    """Patch the interpreter of this process. No value that a kernel computes depends on it."""
    _reuse_numpy_types()
    _reuse_block_types()
    _reuse_shapes()


def _reuse_numpy_types() -> None:
    original, known = interpreter._get_np_dtype, {}

    def numpy_type(of: Any) -> Any:
        name = of.scalar.name
        if name not in known:
            known[name] = original(of)
        return known[name]

    interpreter._get_np_dtype = numpy_type


def _reuse_block_types() -> None:
    original, known = core.block_type.__init__, {}

    def init(self: Any, element: Any, shape: Any) -> None:
        sizes = [getattr(size, "value", size) for size in shape]
        key = (element.name, *sizes)
        if key not in known:
            original(self, element, shape)
            known[key] = vars(self).copy()
        vars(self).update(known[key])

    core.block_type.__init__ = init


def _reuse_shapes() -> None:
    original, known = core.tensor.__init__, {}

    def init(self: Any, handle: Any, type: Any) -> None:
        if type.name not in known:
            original(self, handle, type)
            known[type.name] = self.numel, self.shape
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = known[type.name]

    core.tensor.__init__ = init
