"""Kernels compiled ahead of their first launch: listed here, compiled by many processes at once,
into Triton's cache, where the launch finds them.

    python -m triton_kernels.build.ahead NICENESS

is such a process; its standard input is what it compiles.
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

_MOST_PROCESSES = 16
_KERNELS_A_PROCESS = 2  # for fewer it is not worth starting
_MOST_S = 300  # that a process may take
COMMAND = (sys.executable, "-m", "triton_kernels.build.ahead")  # and a niceness
_logger = logging.getLogger("cbatch")


class Specialisation(NamedTuple):
    """What one compilation is made of. All of it can be pickled; the kernel by its name."""

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
    """Launches within do nothing but for kernels that are compiled already: by key, what they would
    compile."""
    found: dict[str, Specialisation] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        told = json.loads(compile["specialization_data"])
        found[f"{fn.name} {compile['key']}"] = Specialisation(
            fn.module,
            fn.name,
            compile["signature"],
            compile["constants"],
            compile["configs"][0],
            {name: _tuples(value) for name, value in told["options"].items()},
            driver.active.get_current_target(),
        )
        return True  # it counts as done

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        yield found
    finally:
        knobs.runtime.jit_cache_hook = before


def compile_all(found: dict[str, Specialisation], *, processes: int | None = None) -> None:
    """Compile into Triton's cache, unless these were compiled there before."""
    if is_compiled(found):
        return
    work, most = list(found.values()), len(os.sched_getaffinity(0))
    count = processes or min(most, -(-len(work) // _KERNELS_A_PROCESS), _MOST_PROCESSES)
    _logger.info("compiling %d kernels by %d processes", len(work), count)
    end([start(work[at::count]) for at in range(count)], found)


def start(work: list[Specialisation], *, niceness: int = 0) -> subprocess.Popen[bytes]:
    """Start a process that compiles these; its status is 0 if all compile."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    with tempfile.TemporaryFile() as file:
        pickle.dump(work, file)
        file.seek(0)
        environment = os.environ | {"PYTHONPATH": path}
        return subprocess.Popen([*COMMAND, str(niceness)], stdin=file, env=environment)


def is_compiled(found: dict[str, Specialisation]) -> bool:
    """Return whether an earlier start has compiled them all."""
    return not found or _mark(found).exists()


def end(processes: Sequence[subprocess.Popen[bytes]], found: dict[str, Specialisation]) -> None:
    """Wait for the processes that compile these. One that fails is logged; the launch then compiles
    again, and says what is wrong."""
    if any([process.wait() for process in processes]):
        names = ", ".join(sorted({each.name for each in found.values()}))
        _logger.warning("not every kernel could be compiled ahead of: %s", names)
        return
    with suppress(OSError):  # the next start then compiles them again
        _mark(found).parent.mkdir(parents=True, exist_ok=True)
        _mark(found).touch()


def _mark(found: dict[str, Specialisation]) -> Path:
    """A file in Triton's cache that is there once all of these are."""
    digest = hashlib.sha256(triton.__version__.encode())
    for key in sorted(found):
        each = found[key]
        kernel = getattr(importlib.import_module(each.module), each.name)
        digest.update(f"{key} {kernel.cache_key} {each.target}".encode())
    return Path(knobs.cache.dir) / f"cbatch-{digest.hexdigest()[:24]}"


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def main(arguments: Sequence[str]) -> None:
    os.nice(int(arguments[0]))
    signal.alarm(_MOST_S)  # which ends the process
    for each in pickle.load(sys.stdin.buffer):
        each.compile()


if __name__ == "__main__":
    main(sys.argv[1:])
