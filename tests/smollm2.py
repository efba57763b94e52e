"""The mark of tests that need the model smollm2."""

from __future__ import annotations

import pytest

from cbatch.engine.model_files import packaged_path

_PATH = packaged_path("smollm2")
REASON = "needs smollm2: run cbatch get smollm2"
needs_smollm2 = pytest.mark.skipif(_PATH is None or not _PATH.is_file(), reason=REASON)
