"""Cache keys of the kernels that a start compiles ahead, and of those that its capture launches.

    python -m tests.gpu_proofs.cache_keys FOLDER SIZE [--unsettled]

It runs the real start of an executor under a driver that reports an H100: the list of kernels,
child processes, the capture of every graph, then the kernels that are compiled late. Children
write keys to FOLDER in place of compiling, where launches look for theirs. It prints how
many kernels were launched, and those whose keys are missing.

`--unsettled`: without the fix of `triton_kernels.build.jit`, and without the late kernels.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.compiler
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler import make_backend
from triton.runtime import driver
from triton.runtime.cache import get_cache_key
from triton.runtime.jit import DependenciesFinder

_CHILD = "--child"


def key_of(source: Any, target: Any, options: Any) -> str:
    """Return the key that `triton.compile` looks up."""
    backend = make_backend(target)
    environment = get_cache_invalidating_env_vars()
    parsed = backend.parse_options(dict(options or {}))
    key = get_cache_key(source, backend, parsed, env_vars=environment)
    return hashlib.sha256(key.encode()).hexdigest()


def compile_ahead(folder: Path, niceness: str) -> None:
    """Write the keys of a child's kernels, in place of compiling them."""
    from triton_kernels.build import ahead

    def note(source: Any, target: Any = None, options: Any = None) -> None:
        (folder / key_of(source, target, options)).touch()

    triton.compile = note
    ahead.main([niceness])


def start(folder: Path, name: str, command: tuple[str, ...]) -> dict[str, Any]:
    """Start an executor; return which keys its capture did not find in `folder`."""
    import pytest  # children do without it

    from cbatch.runtime.gpu.device import CudaDevice, ladder
    from tests.gpu_proofs.meta import SIZES, MetaDevice, Start
    from tests.triton_kernels.driver import TARGETS, Driver, Launches, Unlaunched
    from triton_kernels.build import ahead

    launched, missing = Counter[str](), Counter[str]()

    def look(source: Any, target: Any = None, options: Any = None, **_: Any) -> Any:
        name = source.fn.__name__
        launched[name] += 1
        missing[name] += not (folder / key_of(source, target, options)).exists()
        return Unlaunched(name, [])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.compiler, "compile", look)  # the function that launches call
        patch.setattr(driver, "_active", Driver(TARGETS["sm_90"]))
        patch.setattr(ahead, "COMMAND", command)
        patch.setattr(ahead, "compile_all", partial(ahead.compile_all, processes=1))
        patch.setattr(MetaDevice, "kernels_of", CudaDevice.kernels_of)
        made = Start(next(size for size in SIZES if size.name == name), "sm_90", Launches())
        made.capture(frozenset())
        late = made.executor.background_kernels
        was_late = list(late.pending)
        if "--unsettled" not in command:
            late.start()
            while late.pending:
                time.sleep(0.05)
            with torch.inference_mode():
                made.executor.step_capture.run_all(made.device, ladder)
    missed = {name: count for name, count in missing.items() if count}
    return {"late": was_late, "launched": launched.total(), "missing": missed}


def main(arguments: list[str]) -> None:
    folder = Path(arguments[0])
    if "--unsettled" in arguments:
        merge = DependenciesFinder._update_hash
        from triton_kernels.build import jit  # noqa: F401

        DependenciesFinder._update_hash = merge
    if _CHILD in arguments:  # followed by the niceness
        compile_ahead(folder, arguments[-1])
        return
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    options = [each for each in arguments if each == "--unsettled"]
    command = (sys.executable, "-m", "tests.gpu_proofs.cache_keys", str(folder), *options, _CHILD)
    print(json.dumps(start(folder, arguments[1], command)))


if __name__ == "__main__":
    main(sys.argv[1:])
