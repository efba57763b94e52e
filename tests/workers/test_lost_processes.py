"""Workers and their fork server may be killed or stopped at any time, or fail to start: each task
ends, and later tasks run."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cbatch.workers import NoWorkerError, WorkerDiedError, WorkerPool
from cbatch.workers import pool as pool_module
from tests.workers.test_pool import LIMITS, SLOW_MACHINE, get, nap, own_pid, run, setup


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "FORK_S", 2.0)


async def two_tasks(workers: WorkerPool) -> None:
    """Run two tasks at once, of which the second needs a new worker."""
    answers = await asyncio.gather(*(workers.run(nap, SLOW_MACHINE) for _ in range(2)))
    assert answers == ["slept"] * 2


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("times", [1, 3])
def test_a_lost_fork_server_is_replaced_while_its_idle_workers_live(sent: int, times: int) -> None:
    async def scene(workers: WorkerPool) -> None:
        servers = set()
        for _ in range(times):
            await two_tasks(workers)
            server = await workers.run(partial(get, "pid"), LIMITS)
            os.kill(server, sent)
            await two_tasks(workers)
            assert not Path(f"/proc/{server}").exists(), "it has ended"
            servers.add(server)
        assert len(servers) == times

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
