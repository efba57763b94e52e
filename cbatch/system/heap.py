"""Memory of a process: settings of its heap, and errors if it has too little."""

from __future__ import annotations

import ctypes
import errno
import gc
from contextlib import suppress

_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # parameters of mallopt(3)
_LARGE_BYTES = 2**18  # malloc returns freed blocks of this size to the system


def freeze_heap() -> None:
    """Exclude all present objects from garbage collection for the life of the process. A full
    collection visits every object and blocks all threads: 80 ms in a server that has just started,
    120 ms in an engine that has imported torch. Later collections visit newer objects only. A
    process that disabled collection for its start collects from now on."""
    gc.collect()  # frozen garbage would never be freed
    gc.freeze()
    gc.enable()


def lower_mmap_threshold() -> None:
    """Set malloc to return blocks of `_LARGE_BYTES` or more to the system when they are freed.
    By default glibc raises this threshold to the largest block freed so far, and a server that had
    read a few long bodies kept 200 MiB. An engine should not call this function: it allocates the
    same large blocks in every step."""
    with suppress(OSError, AttributeError):  # the C library is not glibc
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)


def share_malloc_arena() -> None:
    """Set malloc to serve all threads from one arena. By default each thread gets an arena, and an
    arena keeps freed memory between blocks in use: 20 MiB in an engine that had compiled large
    grammars. Call this function before the process starts threads."""
    with suppress(OSError, AttributeError):  # the C library is not glibc
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def trim_heap() -> None:
    """Collect garbage and return the free memory between small blocks to the system. Takes
    milliseconds if the heap was frozen before; call it while no request waits."""
    gc.collect()
    with suppress(OSError, AttributeError):  # the C library is not glibc
        ctypes.CDLL(None).malloc_trim(0)


_NO_MEMORY = ("failed to map segment", "allocate memory", "can't start new thread")
MEMORY_REMEDY = "ask for less (--kv-cache-memory-bytes), or raise the limit (ulimit -v)"


def memory_problem(error: BaseException) -> str | None:
    """Return in a line what an error says if memory, or address space, is used up; else None."""
    text = (str(error).strip() or "it is used up").splitlines()[-1]
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return text
    return text if any(words in text for words in _NO_MEMORY) else None


def address_space_note() -> str:
    """Return a remark about a limit on address space; empty without a limit. Libraries that reach
    it end the process in ways that do not name it."""
    import resource  # not on Windows, where `cbatch serve` does not run either

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return ""
    return f"; a process may have {limit >> 20} MiB of address space here (ulimit -v)"
