"""Run a command of this project on a simulated GPU:

    TRITON_INTERPRET=1 python -m tests.gpu_proofs.pretence.job cbatch.cli.main generate ...
    TRITON_INTERPRET=1 python -m tests.gpu_proofs.pretence.job bench.gpu --out DIR

Kernels of an engine are replaced by references. Processes that the command starts see the same GPU.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import ExitStack

import pytest
import torch


def settle(scope: ExitStack) -> None:
    """Set up this process, until `scope` ends."""
    from triton_kernels.build import interpreter

    interpreter.repair()
    from cbatch.engine.prices import startup
    from tests.gpu_proofs.pretence.gpu import pretending, use_references

    torch.set_num_threads(1)
    patch = scope.enter_context(pytest.MonkeyPatch.context())
    patch.setattr(sys, "argv", sys.argv[1:])
    for name, few in (("_ROWS", (1, 2)), ("_CHUNKS", (32,)), ("LONG_CONTEXT_TOKENS", 128)):
        patch.setattr(startup, name, few)
    use_references(scope.enter_context(pretending()), patch)


def run(module: str, arguments: list[str]) -> int:
    if module == "bench.gpu":
        from tests.gpu_proofs.pretence import small

        small.shrink()
        module = "bench.gpu.__main__"
    status: int = importlib.import_module(module).main(arguments)
    return status


if __name__ == "__main__":
    with ExitStack() as scope:
        settle(scope)
        code = run(sys.argv[0], sys.argv[1:])
    sys.exit(code)
elif __name__ == "__mp_main__":  # a process started by the command
    scope = ExitStack()  # for the life of the process
    settle(scope)
