"""A plugin of pytest that runs tests of kernels with `--device cuda` on a simulated GPU:

    TRITON_INTERPRET=1 python -m pytest -p tests.gpu_proofs.pretence.plugin --device cuda ...

Kernels are interpreted as they are launched; tensors know their device (`tensors`).
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from tests.gpu_proofs.pretence.gpu import _PROPERTIES, _checked
from tests.gpu_proofs.pretence.tensors import in_all_threads

_scope = ExitStack()
_launched, _from_numpy = GridExecutor.__call__, torch.from_numpy


def _launch(executor: Any, *args: Any, **kwargs: Any) -> None:
    """Launch a kernel; the interpreter's own arrays are the host's."""
    with torch._C.DisableTorchFunction(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "from_numpy", _from_numpy)
        _launched(executor, *args, **kwargs)


def pytest_sessionstart(session: pytest.Session) -> None:
    patch = _scope.enter_context(pytest.MonkeyPatch.context())
    patch.setattr(GridExecutor, "__call__", _checked(_launch))
    patch.setattr(torch.cuda, "get_device_properties", lambda device=None: _PROPERTIES)
    _scope.enter_context(in_all_threads())


def pytest_unconfigure(config: pytest.Config) -> None:
    _scope.close()
