"""Compilation of kernels before their first launch. Several processes compile into Triton's cache,
from which the launch loads the kernels.

    python -m triton_kernels.build.ahead NICENESS

compiles the pickled list of `Specialisation` on its standard input.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

_MAX_PROCESSES = 16
# Least kernels per process: starting a process for one kernel takes longer than it saves.
_KERNELS_A_PROCESS = 2
_MAX_S = 300  # time limit of a process, in seconds
COMMAND = (sys.executable, "-m", "triton_kernels.build.ahead")  # followed by a niceness
_logger = logging.getLogger("cbatch")


class Specialisation(NamedTuple):
    """The arguments of one compilation. The kernel is given by module and name, so that all fields
    can be pickled."""

    module: str
    name: str
    signature: dict[str, Any]
    constexprs: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    target: GPUTarget

    def compile(self) -> None:
        kernel = getattr(importlib.import_module(self.module), self.name)
        source = ASTSource(kernel, self.signature, self.constexprs, self.attributes)
        triton.compile(source, target=self.target, options=self.options)


@contextmanager
def listed() -> Iterator[dict[str, Specialisation]]:
    """Collect the kernels that launches in this context would compile, by cache key; these launches
    do nothing. A kernel that is compiled already runs as usual."""
    kernels: dict[str, Specialisation] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        data = json.loads(compile["specialization_data"])
        kernels[f"{fn.name} {compile['key']}"] = Specialisation(
            fn.module,
            fn.name,
            compile["signature"],
            compile["constants"],
            compile["configs"][0],
            {name: _tuples(value) for name, value in data["options"].items()},
            driver.active.get_current_target(),
        )
        return True  # tells Triton that the launch has been handled

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        yield kernels
    finally:
        knobs.runtime.jit_cache_hook = before


def compile_all(kernels: dict[str, Specialisation], *, processes: int | None = None) -> None:
    """Compile kernels into Triton's cache, unless an earlier start has compiled them all."""
    if is_compiled(kernels):
        return
    work, cpus = list(kernels.values()), len(os.sched_getaffinity(0))
    count = processes or min(cpus, -(-len(work) // _KERNELS_A_PROCESS), _MAX_PROCESSES)
    _logger.info("compiling %d kernels by %d processes", len(work), count)
    end([start(work[at::count]) for at in range(count)], kernels)


def start(work: list[Specialisation], *, niceness: int = 0) -> subprocess.Popen[bytes]:
    """Start a process that compiles these kernels; its exit status is 0 if all compile."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    with tempfile.TemporaryFile() as file:
        pickle.dump(work, file)
        file.seek(0)
        environment = os.environ | {"PYTHONPATH": path}
        return subprocess.Popen([*COMMAND, str(niceness)], stdin=file, env=environment)


def is_compiled(kernels: dict[str, Specialisation]) -> bool:
    """Return whether an earlier start has compiled all of these kernels."""
    return not kernels or _mark(kernels).exists()


def end(processes: Sequence[subprocess.Popen[bytes]], kernels: dict[str, Specialisation]) -> None:
    """Wait for the processes that compile these kernels. A failure is only logged: the first launch
    compiles the kernel again, and raises the error."""
    if any([process.wait() for process in processes]):
        names = ", ".join(sorted({kernel.name for kernel in kernels.values()}))
        _logger.warning("not every kernel could be compiled ahead of: %s", names)
        return
    with suppress(OSError):  # without the marker the next start compiles them again
        _mark(kernels).parent.mkdir(parents=True, exist_ok=True)
        _mark(kernels).touch()


def _mark(kernels: dict[str, Specialisation]) -> Path:
    """Return the path of the marker file that says that all of these kernels are in the cache."""
    digest = hashlib.sha256(triton.__version__.encode())
    for key in sorted(kernels):
        kernel = kernels[key]
        function = getattr(importlib.import_module(kernel.module), kernel.name)
        digest.update(f"{key} {function.cache_key} {kernel.target}".encode())
    return Path(knobs.cache.dir) / f"cbatch-{digest.hexdigest()[:24]}"


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def main(arguments: Sequence[str]) -> None:
    os.nice(int(arguments[0]))
    signal.alarm(_MAX_S)  # its signal ends the process
    for kernel in pickle.load(sys.stdin.buffer):
        kernel.compile()


if __name__ == "__main__":
    main(sys.argv[1:])
