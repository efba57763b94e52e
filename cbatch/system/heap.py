"""Memory of a process that serves: what it keeps for good, and what it gives back."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

_MMAP_THRESHOLD = -3  # of mallopt(3)
_LARGE_BYTES = 2**18


def freeze_heap() -> None:
    """Takes all there is now out of the garbage collector's sight, for good. A full collection goes
    through every object that it sees, and everything waits: 80 ms in a server that has just
    started, 120 ms in an engine that has imported torch. Afterwards it sees what requests made.
    """
    gc.collect()  # or garbage would be kept
    gc.freeze()


def give_back_large_blocks() -> None:
    """From now on blocks of `_LARGE_BYTES` and more go back to the system when they are freed.
    glibc stops doing that with sizes that it has once seen freed: a server that had read a few long
    bodies kept 200 MiB. Not for an engine, which has the same large blocks in every step."""
    with suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)


def give_back_free_memory() -> None:
    """What nobody refers to any more, and what lies free between small blocks, goes back to the
    system. Takes milliseconds, of a heap that was frozen: for moments in which nobody waits."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL(None).malloc_trim(0)
