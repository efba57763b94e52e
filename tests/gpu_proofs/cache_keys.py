"""Cache keys of the kernels that a start compiles ahead, and of those that its capture launches.

    python -m tests.gpu_proofs.cache_keys FOLDER [--size NAME] [--processes 8] [--unsettled]

It runs the real start of an executor under a driver that reports an H100: `GpuExecutor.capture`
with `CudaDevice.kernels_of`, its child processes, the capture of every graph, then the kernels that
are compiled late. Children do not compile but write the key of each kernel to FOLDER, where
launches look for theirs.

It prints a JSON line per size: how many keys were launched, and the kernels whose keys are missing.

`--unsettled`: without the fix of `triton_kernels.build.jit`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.compiler
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler import make_backend
from triton.runtime import driver
from triton.runtime.cache import get_cache_key
from triton.runtime.jit import DependenciesFinder

_FOLDER = "CBATCH_CACHE_KEYS"  # environment variable of the children


def key_of(source: Any, target: Any, options: Any) -> str:
    """Return the key that `triton.compile` looks up."""
    backend = make_backend(target)
    environment = get_cache_invalidating_env_vars()
    parsed = backend.parse_options(dict(options or {}))
    key = get_cache_key(source, backend, parsed, env_vars=environment)
    return hashlib.sha256(key.encode()).hexdigest()


def compile_ahead(niceness: str) -> None:
    """Write the keys of a child's kernels, in place of compiling them."""
    from triton_kernels.build import ahead

    def note(source: Any, target: Any = None, options: Any = None) -> None:
        (Path(os.environ[_FOLDER]) / key_of(source, target, options)).touch()

    triton.compile = note
    ahead.main([niceness])


@contextmanager
def launches_looked_up(folder: Path, missing: Counter[str]) -> Iterator[Counter[str]]:
    """Yield counts of launched kernels by name; `missing` gets those without a key in `folder`."""
    from tests.gpu_proofs.driver import Launches, _Driver, _Unlaunched
    from tests.triton_kernels.compile_check import TARGETS

    launches, launched = Launches(), Counter[str]()

    def look(source: Any, target: Any = None, options: Any = None, **_: Any) -> Any:
        name = source.fn.__name__
        launched[name] += 1
        missing[name] += not (folder / key_of(source, target, options)).exists()
        return _Unlaunched(name, launches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.compiler, "compile", look)  # the function that launches call
        patch.setattr(driver, "_active", _Driver(TARGETS["sm_90"]))
        yield launched


def start(size: Any, folder: Path, command: tuple[str, ...], processes: int) -> dict[str, Any]:
    """Start an executor of `size`; return which keys its capture did not find in `folder`."""
    from cbatch.runtime.gpu.device import CudaDevice, ladder
    from tests.gpu_proofs.driver import Launches
    from tests.gpu_proofs.meta import MetaDevice
    from tests.gpu_proofs.steps import Run
    from triton_kernels.build import ahead

    missing = Counter[str]()
    compile_all = ahead.compile_all
    with launches_looked_up(folder, missing) as launched, pytest.MonkeyPatch.context() as patch:
        patch.setenv(_FOLDER, str(folder))
        patch.setattr(ahead, "COMMAND", command)
        several = partial(compile_all, processes=processes)
        patch.setattr(ahead, "compile_all", several)
        patch.setattr(MetaDevice, "kernels_of", CudaDevice.kernels_of)
        run = Run(size, "sm_90", Launches())
        run.capture(frozenset())
        late = run.executor.background_kernels
        was_late = list(late.pending)
        late.start()
        while late.pending:
            time.sleep(0.05)
        with run.queued, torch.inference_mode():
            run.executor.step_capture.run_all(run.device, ladder)
    return {
        "size": size.name,
        "late": was_late,
        "launched": launched.total(),
        "missing": {name: count for name, count in missing.items() if count},
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_proofs.cache_keys")
    parser.add_argument("path", type=Path, help="folder of keys")
    parser.add_argument("--size", action="append", help="default: all")
    parser.add_argument("--processes", type=int, default=8, help="that compile ahead")
    parser.add_argument("--unsettled", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.unsettled:
        merge = DependenciesFinder._update_hash
        from triton_kernels.build import jit  # noqa: F401

        DependenciesFinder._update_hash = merge
    if options.child:
        compile_ahead(str(options.path))  # the position of its only argument
        return 0
    from tests.gpu_proofs.sizes import USUAL

    command = [sys.executable, "-m", "tests.gpu_proofs.cache_keys", "--child"]
    command += ["--unsettled"] * options.unsettled
    os.environ["TRITON_CACHE_DIR"] = str(options.path)
    for size in USUAL:
        if options.size is None or size.name in options.size:
            result = start(size, options.path, tuple(command), options.processes)
            print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
