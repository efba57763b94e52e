"""Two replicas on Ray Serve: what a death and a change of their number cost, and what Serve itself
does. Each fleet runs in a process of its own."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from typing import Any

import pytest

from tests.server.processes import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.slow]
LEAST_SHARE = 0.8  # of what two servers do with nothing before them; 0.87 to 0.89 were measured
ONLY_LOOPBACK = ("unshare", "--net", "--map-root-user", "sh", "-c", 'ip link set lo up; exec "$@"')


def told_by(module: str) -> dict[str, Any]:
    """Ray listens on every address: it is given a network of its own, where that can be had."""
    pytest.importorskip("ray", reason="needs Ray Serve: pip install 'cbatch[ray]'")
    command = [sys.executable, "-m", module]
    alone = [*ONLY_LOOPBACK, "sh"]
    if shutil.which("unshare") and not subprocess.run([*alone, "true"]).returncode:
        command = [*alone, *command]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=540)
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            print(line)
            found |= json.loads(line)
    assert done.returncode == 0, done.stdout
    return found


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    return told_by("tests.server.ray_fleet")


def test_serve_costs_little(told: dict[str, Any]) -> None:
    rates = {name: statistics.median(each) for name, each in told["rates"].items()}
    share = rates["fleet"] / rates["alone"]
    print(f"{rates['fleet']:.0f} tokens/s, {share:.3f} of two servers alone")
    assert share >= LEAST_SHARE


def test_a_dead_replica_takes_its_own_streams_with_it_and_no_others(told: dict[str, Any]) -> None:
    found = told["kill"]
    ends = found["ends"]
    assert found["open_on_it"] > 0, "nobody would have noticed"
    assert ends.keys() <= {"whole", "cut"}, "tokens were lost or repeated"
    assert 0 < ends["cut"] <= found["open_on_it"]
    assert found["late"].keys() == {"whole"}, "what was not answered yet is asked of another one"


def test_ending_replicas_that_have_calls_loses_none(told: dict[str, Any]) -> None:
    """Serve begins one anew, since it is a new deployment, and ends the two in the middle of it."""
    found = told["scale"]
    assert len(found["open"]) == 2 and all(found["open"].values())
    assert found["ends"].keys() == {"whole"}
    assert len(found["left"]) == 1 and not set(found["left"]) & set(found["open"])


def test_who_takes_longer_than_the_grace_time_is_told(told: dict[str, Any]) -> None:
    assert told["end"]["whole"] == 0
    (message,) = told["end"]["errors"]
    assert "grace time of 1 s" in message


def test_the_command_serves_until_it_is_told_to_stop() -> None:
    found = told_by("tests.server.ray_command")
    assert found["same"][0] == 0 and found["same"][1] > 0, "a session has one replica"
    assert found["others"][0] > 0, "sessions have more than one"
    (message,) = found["errors"]
    assert "grace time of 1 s" in message
    assert found["status"] == 0
