"""Errors of a process that has too little memory, or address space."""

from __future__ import annotations

import errno

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
