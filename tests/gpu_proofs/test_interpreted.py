"""The proofs of the folder `interpreted`, in a process where kernels are interpreted."""

from __future__ import annotations

import pytest


@pytest.mark.slow
def test_proofs_in_the_interpreter(interpreted: tuple[int, str]) -> None:
    status, output = interpreted
    assert status == 0, output
    assert " passed" in output
