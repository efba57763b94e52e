"""Collections do not visit objects that a process created before it serves."""

from __future__ import annotations

import asyncio
import gc
import platform
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from cbatch.server.http import run
from cbatch.server.http.run import DrainingServer
from cbatch.system.heap import freeze_heap
from tests.process.factories import FrozenFactory
from tests.process.watching import running


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


class Ring:
    """Garbage that only a full collection frees."""

    def __init__(self) -> None:
        self.itself = self


def test_collections_skip_frozen_objects_and_visit_later_ones() -> None:
    lists: list[Any] = [[] for _ in range(20_000)]
    before = weakref.ref(Ring())
    seen = len(gc.get_objects())
    freeze_heap()
    assert before() is None, "garbage was frozen"
    assert len(gc.get_objects()) < seen / 10 and len(lists) == 20_000
    later = weakref.ref(Ring())
    assert later() is not None
    gc.collect()
    assert later() is None


def frozen_at_start() -> int:
    """Return the number of objects that a server's process has frozen when it reports that it
    listens."""
    counts: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("a call came")

    async def scene() -> None:
        config = uvicorn.Config(app, port=0, log_level="warning", lifespan="off")
        service: Any = SimpleNamespace(client=SimpleNamespace(down=None), num_open=1)

        def on_listening(_: int) -> None:
            counts.append(gc.get_freeze_count())
            server.should_exit = True

        server = DrainingServer(config, service, grace_s=0, on_listening=on_listening)
        await server.serve()

    asyncio.run(scene())
    (count,) = counts
    return count


def test_a_server_freezes_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert frozen_at_start() > 10_000
    gc.unfreeze()
    monkeypatch.setattr(run, "freeze_heap", lambda: None)
    assert frozen_at_start() == 0


def test_an_engine_freezes_before_it_serves(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(FrozenFactory(str(tmp_path / "count"))):
            pass

    asyncio.run(scene())
    assert int((tmp_path / "count").read_text()) > 10_000


def kept_mib(script: str, how: str) -> float:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", script, how]
    return float(subprocess.run(command, cwd=root, capture_output=True, check=True).stdout)


KEPT = """
import sys, threading
import msgspec
from cbatch.system.heap import lower_mmap_threshold

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * 4 / 1024

def read(count):
    msgspec.json.decode(b'{"x":[' + b"1," * count + b"1]}")

if sys.argv[1] == "gives back":
    lower_mmap_threshold()
before = resident_mib()
for i in range(12):
    threads = [threading.Thread(target=read, args=(2_000_000 + 10**5 * ((i + j) % 7),))
               for j in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
print(resident_mib() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_memory_of_long_bodies_is_returned() -> None:
    """Four threads read bodies of 4 MB. Their memory is freed, and returned to the system."""
    assert kept_mib(KEPT, "gives back") < 20 < kept_mib(KEPT, "keeps")


SCATTERED = """
import sys
from cbatch.system.heap import trim_heap

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * 4 / 1024

before = resident_mib()
held = [bytes(2000) for _ in range(50_000)]
del held[::2], held[:-1]
if sys.argv[1] == "gives back":
    trim_heap()
print(resident_mib() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_free_memory_before_a_used_block_is_returned() -> None:
    assert kept_mib(SCATTERED, "gives back") < 20 < kept_mib(SCATTERED, "keeps")


THREADS = """
import ctypes, re, sys, threading
from cbatch.system.heap import share_malloc_arena

if sys.argv[1] == "one arena":
    share_malloc_arena()
malloc = ctypes.CDLL(None).malloc
malloc.restype = ctypes.c_void_p
blocks = []
thread = threading.Thread(target=lambda: blocks.append(malloc(1000)))
thread.start()
thread.join()
heap = re.search(r"^(\\w+)-(\\w+) .*\\[heap\\]$", open("/proc/self/maps").read(), re.MULTILINE)
print(int(int(heap[1], 16) <= blocks[0] < int(heap[2], 16)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_threads_allocate_from_the_main_arena() -> None:
    assert (kept_mib(THREADS, "one arena"), kept_mib(THREADS, "an arena each")) == (1, 0)
