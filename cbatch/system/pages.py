"""Large zeroed memory whose pages are allocated in the background."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import weakref
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

_CHUNK_BYTES = 1 << 25  # memory that one call of `madvise` allocates
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14: allocates pages, keeps their contents


def zeros_populated_in_background(num_bytes: int) -> NDArray[np.uint8]:
    """Return zeroed memory that can be used at once. A low-priority thread faults its pages in,
    because clearing gigabytes here would dominate the start-up time. Later steps then wait for no
    page faults, and the process soon reaches its final memory use."""
    memory = np.zeros(num_bytes, dtype=np.uint8)
    if num_bytes >= _CHUNK_BYTES and platform.system() == "Linux":
        # A weak reference: the memory may be freed before the thread has finished.
        arguments = weakref.ref(memory), memory.ctypes.data, num_bytes
        threading.Thread(target=_populate, args=arguments, name="cbatch-pages", daemon=True).start()
    return memory


def _populate(memory_ref: weakref.ref[NDArray[np.uint8]], address: int, num_bytes: int) -> None:
    with suppress(OSError):  # sets the priority of this thread only
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    page = os.sysconf("SC_PAGE_SIZE")
    end = (address + num_bytes) // page * page
    for at in range(-(-address // page) * page, end, _CHUNK_BYTES):
        memory = memory_ref()
        if memory is None or madvise(at, min(_CHUNK_BYTES, end - at), _POPULATE_WRITE):
            return  # freed, or an older kernel: it allocates pages at first use
        del memory
