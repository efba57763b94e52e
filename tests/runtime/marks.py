"""Requirements of some tests on the machine; without them the tests skip."""

from __future__ import annotations

import platform

import pytest

from cbatch.runtime.compiled import compiler, find_compiler


def has_compiler() -> bool:
    return find_compiler() is not None and platform.system() == "Linux"


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C compiler, or not Linux")


def without_compilers(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("PATH", "")
    patch.delenv("CC", raising=False)
    patch.setattr(compiler, "has_ziglang", lambda: False)
