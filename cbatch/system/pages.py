"""Large memory of zeros, whose pages the system gives a little later."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import weakref
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

_CHUNK_BYTES = 1 << 25
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14: pages come, contents stay


def zeros_in_time(num_bytes: int) -> NDArray[np.uint8]:
    """To write gigabytes of zeros would be most of a start. They can be used at once; a thread of
    low priority has their pages made meanwhile, so that no later step waits for them and what the
    process takes of the machine soon stays what it is."""
    memory = np.zeros(num_bytes, dtype=np.uint8)
    if num_bytes >= _CHUNK_BYTES and platform.system() == "Linux":
        # Held weakly: it may go before the last of its pages came.
        arguments = weakref.ref(memory), memory.ctypes.data, num_bytes
        threading.Thread(target=_populate, args=arguments, name="cbatch-pages", daemon=True).start()
    return memory


def _populate(held: weakref.ref[NDArray[np.uint8]], address: int, num_bytes: int) -> None:
    with suppress(OSError):  # of this thread alone
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    page = os.sysconf("SC_PAGE_SIZE")
    end = (address + num_bytes) // page * page
    for at in range(-(-address // page) * page, end, _CHUNK_BYTES):
        memory = held()
        if memory is None or madvise(at, min(_CHUNK_BYTES, end - at), _POPULATE_WRITE):
            return  # an older kernel makes them as they are used
        del memory
