"""Tasks that take unlimited time or memory, or end their process: each ends soon, and no other task
does. Workers and their fork server may be killed or stopped at any time, or fail to start."""

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
from cbatch.workers import (
    NoWorkerError,
    PoolClosedError,
    TaskLimits,
    WorkerDiedError,
    WorkerPool,
)
from cbatch.workers import pool as pool_module

LIMITS = TaskLimits(cpu_s=0.3, memory_bytes=2**27)
SLOW_MACHINE = LIMITS._replace(cpu_s=60)  # for tasks that end before any time limit


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "FORK_S", 2.0)


def setup() -> dict[str, int]:
    return {"answer": 42, "pid": os.getpid()}


def get(name: str, state: dict[str, int]) -> int:
    return state[name]


def own_pid(state: dict[str, int]) -> int:
    return os.getpid()


def spin_in_c(state: Any) -> None:
    sum(iter(int, 1))


def sleep(state: Any) -> None:
    time.sleep(600)


def nap(state: Any) -> str:
    time.sleep(0.5)
    return "slept"


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
        many = await asyncio.gather(*(workers.run(own_pid, LIMITS) for _ in range(8)))
        assert len(set(many)) > 1 and len(workers._idle[False]) <= pool_module.MAX_IDLE
        pids = {await workers.run(own_pid, LIMITS) for _ in range(5)}
        assert len(pids) == 1, "a quick task's worker is reused"
        assert await workers.run(partial(get, "pid"), LIMITS) not in pids

    run(scene)


@pytest.mark.parametrize(
    ("task", "overran"),
    [(spin_in_c, True), (eat_slowly, False), (abort, False)],
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


@pytest.mark.parametrize("task", [sleep, spin_in_c])
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


# ---- lost processes ----


async def two_tasks(workers: WorkerPool) -> None:
    """Run two tasks at once, of which the second needs a new worker."""
    answers = await asyncio.gather(*(workers.run(nap, SLOW_MACHINE) for _ in range(2)))
    assert answers == ["slept"] * 2


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_fork_server_is_replaced_while_its_idle_workers_live(sent: int) -> None:
    async def scene(workers: WorkerPool) -> None:
        servers = set()
        for _ in range(2):
            await two_tasks(workers)
            server = await workers.run(partial(get, "pid"), LIMITS)
            os.kill(server, sent)
            await two_tasks(workers)
            assert not Path(f"/proc/{server}").exists(), "it has ended"
            servers.add(server)
        assert len(servers) == 2

    run(scene)


def test_a_fork_server_that_is_lost_during_tasks_ends_no_task() -> None:
    async def scene(workers: WorkerPool) -> None:
        server = await workers.run(partial(get, "pid"), LIMITS)
        busy = [asyncio.create_task(workers.run(nap, SLOW_MACHINE)) for _ in range(2)]
        await asyncio.sleep(0.2)
        os.kill(server, signal.SIGKILL)
        assert await asyncio.gather(*busy) == ["slept"] * 2
        await two_tasks(workers)

    run(scene)


def test_all_workers_are_killed_while_their_fork_server_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No process tells that they died."""
    monkeypatch.setattr(pool_module, "WALL", 2)

    async def scene(workers: WorkerPool) -> None:
        worker = await workers.run(own_pid, LIMITS)
        server = await workers.run(partial(get, "pid"), LIMITS)
        os.kill(server, signal.SIGSTOP)
        os.kill(worker, signal.SIGKILL)
        assert await workers.run(partial(get, "answer"), LIMITS) == 42
        await two_tasks(workers)

    run(scene)


def test_a_stopped_worker_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that it has not begun runs in another worker."""
    monkeypatch.setattr(pool_module, "WALL", 2)

    async def scene(workers: WorkerPool) -> None:
        idle = await workers.run(own_pid, LIMITS)
        os.kill(idle, signal.SIGSTOP)
        assert await workers.run(own_pid, LIMITS) != idle
        with pytest.raises(WorkerDiedError):
            await workers.run(stop_itself, LIMITS)
        await two_tasks(workers)

    run(scene)


def stop_itself(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def without_processes(path: Path) -> dict[str, int]:
    """Return what `setup` does. Forks fail while `path` exists."""
    fork = os.fork

    def limited() -> int:
        if path.exists():
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    os.fork = limited
    return setup()


def test_a_system_without_more_processes_costs_only_the_tasks_of_that_time(tmp_path: Path) -> None:
    """Idle workers serve, and the fork server lives on."""

    async def scene() -> None:
        workers = WorkerPool(partial(without_processes, tmp_path / "full"))
        server = await workers.run(partial(get, "pid"), LIMITS)
        (tmp_path / "full").touch()
        answers = await asyncio.gather(
            *(workers.run(nap, SLOW_MACHINE) for _ in range(3)), return_exceptions=True
        )
        assert "slept" in answers
        failed = [each for each in answers if each != "slept"]
        assert len(failed) == 2 and all(isinstance(each, NoWorkerError) for each in failed)
        (tmp_path / "full").unlink()
        await two_tasks(workers)
        assert await workers.run(partial(get, "pid"), LIMITS) == server
        await workers.close()

    asyncio.run(asyncio.wait_for(scene(), 120))


def fail_to_start() -> None:
    raise RuntimeError("no memory")


@pytest.mark.parametrize("start", [fail_to_start, partial(os._exit, 1)])
def test_a_fork_server_that_does_not_start_fails_its_tasks(start: Callable[[], Any]) -> None:
    async def scene() -> None:
        workers = WorkerPool(start)
        for _ in range(2):
            with pytest.raises(NoWorkerError, match="no worker process can be started"):
                await workers.run(own_pid, LIMITS)
        await workers.close()

    asyncio.run(asyncio.wait_for(scene(), 120))


class Local(Exception):
    """An exception that pickle cannot make again."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def unpicklable_result(_: Any) -> Any:
    return lambda: None


def unpicklable_error(_: Any) -> None:
    error = ValueError("mine")
    error.callback = lambda: None  # type: ignore[attr-defined]
    raise error


def error_of_two_arguments(_: Any) -> None:
    raise Local("mine", "yours")


@pytest.mark.parametrize("task", [unpicklable_result, unpicklable_error, error_of_two_arguments])
def test_an_answer_that_cannot_be_sent_is_an_error_of_its_task(task: Callable[[Any], Any]) -> None:
    async def scene(workers: WorkerPool) -> None:
        worker = await workers.run(own_pid, LIMITS)
        for _ in range(3):
            with pytest.raises(Exception) as caught:
                await workers.run(task, LIMITS)
            assert not isinstance(caught.value, WorkerDiedError | TypeError), repr(caught.value)
        assert await workers.run(own_pid, LIMITS) == worker, "the worker lives on"

    run(scene)


def test_closing_does_not_wait_for_a_stopped_fork_server() -> None:
    async def scene() -> float:
        workers = WorkerPool(setup)
        server = await workers.run(partial(get, "pid"), LIMITS)
        os.kill(server, signal.SIGSTOP)
        began_s = time.monotonic()
        await workers.close()
        assert not Path(f"/proc/{server}").exists()
        return time.monotonic() - began_s

    assert asyncio.run(asyncio.wait_for(scene(), 120)) < 60
