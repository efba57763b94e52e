"""Products by our own kernel (`compiled.c`), compiled for this CPU the first time it is wanted.

Libraries leave two gaps there: few rows, above all of bf16 on CPUs without bf16 instructions, and
bits that change with the number of rows. The kernel keeps weights in the type they come in, packed
in panels, has the same bits for a row in any company, and needs a C compiler (`CC`, or cc, gcc or
clang); where there is none, products go without it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from cbatch.cache import cache_folder

_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC")
_COMPILE_TIMEOUT_S = 60.0
_ALIGNMENT_BYTES = 64
_PANELS_AT_ONCE = 256
_ALONE_BELOW = 1 << 18  # multiplications that one thread does sooner than two get together
_DTYPES = (torch.float32, torch.bfloat16)


class CompiledProduct:
    """y = (x * in_scale) W^T + bias over fp32 rows [T, in], contiguous: fp32 [T, out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None, in_scale: Tensor | None) -> None:
        """Raises ValueError where `compiles` says no."""
        kernel = _kernel()
        if kernel is None or not compiles(weight.shape[1], weight.dtype):
            raise ValueError(f"weight: {weight.dtype} of {tuple(weight.shape)} has no kernel here")
        if in_scale is not None and weight.dtype == torch.float32:
            weight, in_scale = weight * in_scale, None  # bf16 would round it
        # Held, since the kernel is given addresses.
        self._call = kernel.product
        self._panels = _panels(weight, kernel.lanes())
        self._bias = None if bias is None else bias.float().contiguous()
        self._scale = None if in_scale is None else in_scale.float().contiguous()
        self._addresses = _address(self._scale), _address(self._panels), _address(self._bias)
        self._half = weight.dtype == torch.bfloat16
        self._out, self._in = weight.shape

    def __call__(self, x: Tensor, rows: int) -> Tensor:
        y = x.new_empty(rows, self._out)
        scale, weight, bias = self._addresses
        alone = rows * self._out * self._in < _ALONE_BELOW
        failed = self._call(
            x.data_ptr(),
            scale,
            weight,
            bias,
            y.data_ptr(),
            rows,
            self._in,
            self._out,
            self._half,
            1 if alone else torch.get_num_threads(),
        )
        if failed:
            raise MemoryError(f"a product of {rows} rows with {self._in} columns")
        return y


def compiles(columns: int, dtype: torch.dtype) -> bool:
    """Whether the kernel is to be had here, for weights of that many columns and that type."""
    return dtype in _DTYPES and columns % 2 == 0 and _kernel() is not None


def _panels(weight: Tensor, lanes: int) -> Tensor:
    """Weights [out, in] as the kernel wants them: [panels, in, lanes], the last panel filled up
    with zeros; of bf16 pairs of columns, [panels, in / 2, lanes, 2]. Aligned."""
    out, columns = weight.shape
    pair = 2 if weight.dtype == torch.bfloat16 else 1
    count = -(-out // lanes)
    spare = _ALIGNMENT_BYTES // weight.element_size()
    memory = weight.new_zeros(count * lanes * columns + spare)
    start = -memory.data_ptr() % _ALIGNMENT_BYTES // weight.element_size()
    panels = memory[start : start + count * lanes * columns].view(count, columns // pair, -1, pair)
    for first in range(0, count, _PANELS_AT_ONCE):  # a copy of all at once would need the room
        some = weight[first * lanes : (first + _PANELS_AT_ONCE) * lanes]
        some = F.pad(some, (0, 0, 0, -len(some) % lanes))
        paired = some.view(-1, lanes, columns // pair, pair).transpose(1, 2)
        panels[first : first + _PANELS_AT_ONCE].copy_(paired)
    return panels


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@functools.lru_cache(maxsize=1)
def _kernel() -> ctypes.CDLL | None:
    """The compiled library, or None: no compiler, or another system."""
    if platform.system() != "Linux":  # elsewhere torch brings another OpenMP
        return None
    try:
        kernel = ctypes.CDLL(str(_library()), mode=os.RTLD_NOW)
    except (OSError, subprocess.SubprocessError):
        return None
    kernel.product.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_long] * 3 + [ctypes.c_int] * 2
    return kernel


def _library() -> Path:
    """The shared library, from the cache or compiled now. Raises OSError or SubprocessError.

    It is linked without an OpenMP of its own: torch's, which is loaded by then, gives both one pool
    of threads.
    """
    compiler = find_compiler()
    if compiler is None:
        raise FileNotFoundError("no C compiler")
    key = hashlib.sha256(_SOURCE.read_bytes())
    for part in (compiler, *_FLAGS, _cpu()):
        key.update(part.encode())
    library = cache_folder("compiled") / f"product-{key.hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / "product"
            _run(compiler, *_FLAGS, "-c", str(_SOURCE), "-o", f"{made}.o")
            _run(compiler, "-shared", f"{made}.o", "-o", f"{made}.so")
            os.replace(f"{made}.so", library)  # another process may do the same
    return library


def find_compiler() -> str | None:
    names = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    return next(filter(None, map(shutil.which, names)), None)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S)


def _cpu() -> str:
    """What the compiler makes "native" of: the CPU's features."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
