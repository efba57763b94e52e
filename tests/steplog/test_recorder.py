from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from cbatch.cli.model_service import require_record
from cbatch.core.request.errors import FieldError
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.events import Added, Cancelled, Configured
from cbatch.steplog import recorder
from cbatch.steplog.recorded_run import RecordedRun
from cbatch.steplog.recorder import StepRecorder
from cbatch.steplog.step_log import StepLogError, engines_of, read_step_log
from sim.workload.traces.step_log import joined
from tests.helpers import World, make_config, make_request


def run_world(path: Path, name: str) -> World:
    log = StepRecorder(path)
    world = World(log=log)
    world.add(make_request(name, max_tokens=5))
    world.run()
    log.close()
    return world


@pytest.mark.parametrize("cut_bytes", [0, 1, 40])
def test_what_is_cut_short_is_cut_off_before_it_goes_on(tmp_path: Path, cut_bytes: int) -> None:
    path = tmp_path / "log"
    run_world(path, "a")
    whole = read_step_log(path).events
    os.truncate(path, path.stat().st_size - cut_bytes)
    run_world(path, "b")
    log = read_step_log(path)
    first, second = engines_of(log.events)
    assert log.warning is None and len(first) == len(whole) - (cut_bytes > 0)
    assert len(second) == len(whole)


@pytest.mark.parametrize("size_bytes", [0, 3, 30])
def test_a_header_cut_short_is_written_again(tmp_path: Path, size_bytes: int) -> None:
    path = tmp_path / "log"
    run_world(path, "a")
    os.truncate(path, size_bytes)
    run_world(path, "b")
    assert len(list(engines_of(read_step_log(path).events))) == 1


def test_another_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("my notes\n")
    with pytest.raises(StepLogError, match="not a step log"):
        StepRecorder(path)
    assert path.read_text() == "my notes\n"


def test_a_slow_disk_holds_up_no_step_and_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, gate = threading.Event(), threading.Event()
    write = os.write

    def stuck(file: int, content: bytes) -> int:
        if threading.current_thread().name == "cbatch-recorder":
            begun.set()
            gate.wait(30)
        return write(file, content)

    path = tmp_path / "log"
    log = StepRecorder(path, max_waiting=50)
    monkeypatch.setattr(recorder.os, "write", stuck)
    configured = Configured(make_config())
    with caplog.at_level(logging.ERROR):
        log(configured)
        assert begun.wait(30)
        for _ in range(500):
            log(configured)
    assert "the recording ends here" in caplog.text and "lags by 50 events" in caplog.text
    gate.set()
    log.close()
    recorded = read_step_log(path)
    assert recorded.warning is None and len(recorded.events) <= 51


def test_a_full_disk_ends_the_recording_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    path = tmp_path / "log"
    log = StepRecorder(path)
    monkeypatch.setattr(recorder.os, "write", full)
    log(Configured(make_config()))
    log.close()
    assert "No space left" in caplog.text


def test_an_event_that_cannot_be_encoded_ends_the_recording(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with StepRecorder(tmp_path / "log") as log:
        log(Cancelled(object(), 0.0))  # type: ignore[arg-type]
    assert "object cannot be written to a step log" in caplog.text


def test_a_process_that_ends_without_close_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    imports = (
        "from cbatch.core.scheduler.events import Configured; from cbatch.steplog import recorder; "
        "from cbatch.core.scheduler.config import SchedulerConfig"
    )
    event = "Configured(SchedulerConfig(num_blocks=7))"
    code = f"{imports}; recorder.StepRecorder({str(path)!r})({event})"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert read_step_log(path).events == (Configured(SchedulerConfig(num_blocks=7)),)


def test_time_goes_on_after_the_machine_was_started_again() -> None:
    """The clock of the second boot begins at 0. Cancelled requests of the first boot are not those
    of the second, though they have the same ids."""
    a, b = make_request("0", max_tokens=5), make_request("0", max_tokens=5)
    configured = Configured(make_config())
    events = [configured, Added(a, 100.0), Cancelled("0", 101.0), configured, Added(b, 2.0)]
    first, second = joined(map(RecordedRun, engines_of(events)))
    assert first.arrival_s == 100.0 and second.arrival_s == pytest.approx(101.0)
    still_open = [configured, Added(a, 100.0), configured, Added(b, 102.0)]
    (one,) = joined(map(RecordedRun, engines_of(still_open)))
    assert one.arrival_s == 100.0 and not one.ended


def test_a_second_recorder_of_one_file_is_refused(tmp_path: Path) -> None:
    """Their events would be mixed. The lock ends with its process, however that ends."""
    path = tmp_path / "log"
    with StepRecorder(path):
        with pytest.raises(StepLogError, match="another engine is recording"):
            StepRecorder(path)
        with pytest.raises(FieldError, match="record: .*another engine is recording"):
            require_record(str(path))
    run_world(path, "a")
    code = f"from cbatch.steplog import recorder; recorder.StepRecorder({str(path)!r})\n"
    other = subprocess.Popen(
        [sys.executable, "-c", f"{code}print('open', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with other:
        assert other.stdout is not None and other.stdout.readline() == b"open\n"
        with pytest.raises(StepLogError, match="another engine is recording"):
            StepRecorder(path)
        other.kill()
    run_world(path, "b")
    log = read_step_log(path)
    assert log.warning is None and len(list(engines_of(log.events))) == 2


def test_a_file_system_without_locks_is_recorded_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    run_world(tmp_path / "log", "a")
    assert len(list(engines_of(read_step_log(tmp_path / "log").events))) == 1
