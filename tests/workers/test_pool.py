"""Tasks that take unlimited time or memory, or end their process: each ends soon, and no other task
does."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cbatch.core.request.errors import FieldError
from cbatch.workers import PoolClosedError, TaskLimits, WorkerDiedError, WorkerPool
from cbatch.workers import pool as pool_module

LIMITS = TaskLimits(cpu_s=0.3, memory_bytes=2**27)
SLOW_MACHINE = LIMITS._replace(cpu_s=60)  # for tasks that end before any time limit


def setup() -> dict[str, int]:
    return {"answer": 42, "pid": os.getpid()}


def get(name: str, state: dict[str, int]) -> int:
    return state[name]


def own_pid(state: dict[str, int]) -> int:
    return os.getpid()


def spin(state: Any) -> None:
    while True:
        pass


def spin_in_c(state: Any) -> None:
    sum(iter(int, 1))


def sleep(state: Any) -> None:
    time.sleep(600)


def nap(state: Any) -> str:
    time.sleep(0.5)
    return "slept"


def eat(state: Any) -> int:
    return len("a" * 10**9)


def eat_slowly(state: Any) -> int:
    strings = []
    while True:
        strings.append("a" * 10**6 + str(len(strings)))


def abort(state: Any) -> None:
    os.abort()


def note_and_abort(path: Path, state: Any) -> None:
    with path.open("a") as file:
        file.write("begun\n")
    os.abort()


def refuse(state: Any) -> None:
    raise FieldError("a", "is wrong", "mend it")


def fail(state: Any) -> None:
    raise KeyError("on purpose")


def big(state: Any) -> bytes:
    return b"a" * 2**22


def run(scene: Callable[[WorkerPool], Awaitable[None]]) -> None:
    async def bounded() -> None:
        workers = WorkerPool(setup)
        try:
            async with asyncio.timeout(120):
                await scene(workers)
        finally:
            await workers.close()

    asyncio.run(bounded())


def test_a_task_gets_the_result_of_setup() -> None:
    async def scene(workers: WorkerPool) -> None:
        assert await workers.run(partial(get, "answer"), LIMITS) == 42
        assert await workers.run(big, LIMITS) == big(None)
        pids = {await workers.run(own_pid, LIMITS) for _ in range(5)}
        assert len(pids) == 1, "a quick task's worker is reused"
        assert await workers.run(partial(get, "pid"), LIMITS) not in pids

    run(scene)


@pytest.mark.parametrize(
    ("task", "overran"),
    [(spin, True), (spin_in_c, True), (eat, False), (eat_slowly, False), (abort, False)],
)
def test_a_task_that_exceeds_its_limits_ends_only_itself(
    task: Callable[[Any], Any], overran: bool
) -> None:
    async def scene(workers: WorkerPool) -> None:
        limits = LIMITS if overran else SLOW_MACHINE
        hostile = [asyncio.create_task(workers.run(task, limits)) for _ in range(3)]
        while not all(each.done() for each in hostile):
            assert await workers.run(partial(get, "answer"), LIMITS) == 42
            await asyncio.sleep(0.01)
        for attack in hostile:
            error = attack.exception()
            assert isinstance(error, WorkerDiedError) and error.overran == overran

    run(scene)


def test_the_exception_of_a_task_is_raised_to_its_caller() -> None:
    async def scene(workers: WorkerPool) -> None:
        with pytest.raises(FieldError) as caught:
            await workers.run(refuse, LIMITS)
        assert (caught.value.field, caught.value.remedy) == ("a", "mend it")
        with pytest.raises(KeyError) as failed:
            await workers.run(fail, LIMITS)
        assert "in fail" in failed.value.__notes__[0], "the note has the worker's traceback"

    run(scene)


@pytest.mark.parametrize("task", [sleep, spin])
def test_an_abandoned_task_is_ended(task: Callable[[Any], Any]) -> None:
    async def scene(workers: WorkerPool) -> None:
        pid = await workers.run(own_pid, LIMITS)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(workers.run(task, LIMITS._replace(cpu_s=600)), 0.1)
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.01)
        assert await workers.run(partial(get, "answer"), LIMITS) == 42

    run(scene)


def test_a_task_that_sleeps_is_ended_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "WALL", 1)

    async def scene(workers: WorkerPool) -> None:
        with pytest.raises(WorkerDiedError) as caught:
            await workers.run(sleep, LIMITS)
        assert caught.value.overran

    run(scene)


@pytest.mark.parametrize("victim", ["worker", "fork server"])
def test_processes_that_were_killed_are_replaced(victim: str) -> None:
    async def scene(workers: WorkerPool) -> None:
        worker, server = (
            await workers.run(own_pid, LIMITS),
            await workers.run(partial(get, "pid"), LIMITS),
        )
        os.kill(worker if victim == "worker" else server, signal.SIGKILL)
        for _ in range(3):
            assert await workers.run(partial(get, "answer"), LIMITS) == 42

    run(scene)


def test_a_task_that_ends_a_reused_worker_at_once_is_not_repeated(tmp_path: Path) -> None:
    async def scene(workers: WorkerPool) -> None:
        pid = await workers.run(own_pid, LIMITS)
        assert await workers.run(own_pid, LIMITS) == pid, "the worker was reused"
        with pytest.raises(WorkerDiedError):
            await workers.run(partial(note_and_abort, tmp_path / "tasks"), LIMITS)
        assert (tmp_path / "tasks").read_text() == "begun\n"

    run(scene)


def status_of(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text()


def test_all_processes_end_with_their_client() -> None:
    async def scene() -> list[int]:
        workers = WorkerPool(setup)
        await workers.warm()
        pids = [await workers.run(task, LIMITS) for task in (own_pid, partial(get, "pid"))]
        busy = asyncio.create_task(workers.run(sleep, LIMITS._replace(cpu_s=600)))
        await asyncio.sleep(0.1)
        await workers.close()
        for late in (busy, workers.run(own_pid, LIMITS)):
            with pytest.raises(PoolClosedError):
                await late
        return pids

    for pid in asyncio.run(asyncio.wait_for(scene(), 120)):
        while Path(f"/proc/{pid}").exists() and "State:\tZ" not in status_of(pid):
            time.sleep(0.01)  # zombies are reaped by another process


def test_a_task_that_waits_for_the_first_process_ends_with_the_pool() -> None:
    async def scene() -> None:
        workers = WorkerPool(setup)
        waiting = asyncio.create_task(workers.run(own_pid, LIMITS))
        await asyncio.sleep(0.01)
        await workers.close()
        with pytest.raises(PoolClosedError):
            await waiting

    asyncio.run(asyncio.wait_for(scene(), 120))


def test_a_stop_signal_to_all_processes_ends_no_task() -> None:
    """A terminal or systemd signals all processes; the server that owns the tasks ends the
    others."""

    async def scene(workers: WorkerPool) -> None:
        pids = [await workers.run(task, LIMITS) for task in (own_pid, partial(get, "pid"))]
        busy = asyncio.create_task(workers.run(nap, LIMITS._replace(cpu_s=60)))
        await asyncio.sleep(0.1)
        for pid in pids:
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(pid, number)
        assert await busy == "slept"

    run(scene)


def test_many_tasks_at_once_have_workers_of_their_own() -> None:
    async def scene(workers: WorkerPool) -> None:
        pids = await asyncio.gather(*(workers.run(own_pid, LIMITS) for _ in range(8)))
        assert len(set(pids)) > 1
        assert len(workers._idle[False]) <= pool_module.MAX_IDLE

    run(scene)
