"""The marks of tests that need the packaged models."""

from __future__ import annotations

import pytest

from cbatch.engine.model_files import packaged_path


def _needs(name: str) -> pytest.MarkDecorator:
    path = packaged_path(name)
    reason = f"needs {name}: run cbatch get {name}"
    return pytest.mark.skipif(path is None or not path.is_file(), reason=reason)


needs_smollm2, needs_gemma3 = _needs("smollm2"), _needs("gemma3-270m")
