"""Two replicas on Ray Serve: lost streams when a replica dies or their number changes, and the
overhead of Serve. Each fleet runs in a process of its own."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from typing import Any

import pytest

from tests.server.engines import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.slow]
MIN_SHARE = 0.8  # of the rate of two servers without a proxy; 0.87 to 0.89 were measured
ONLY_LOOPBACK = ("unshare", "--net", "--map-root-user", "sh", "-c", 'ip link set lo up; exec "$@"')


def results_of(*arguments: str) -> dict[str, Any]:
    """Run a fleet and return its results, in a new network namespace if possible, since Ray listens
    on all addresses."""
    pytest.importorskip("ray", reason="needs Ray Serve: pip install 'cbatch[ray]'")
    command = [sys.executable, "-m", "tests.server.ray_fleet", *arguments]
    alone = [*ONLY_LOOPBACK, "sh"]
    if shutil.which("unshare") and not subprocess.run([*alone, "true"]).returncode:
        command = [*alone, *command]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=540)
    results: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            print(line)
            results |= json.loads(line)
    assert done.returncode == 0, done.stdout
    return results


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return results_of()


def test_serve_costs_little(results: dict[str, Any]) -> None:
    rates = {name: statistics.median(each) for name, each in results["rates"].items()}
    share = rates["fleet"] / rates["alone"]
    print(f"{rates['fleet']:.0f} tokens/s, {share:.3f} of two servers alone")
    assert share >= MIN_SHARE


def test_a_dead_replica_ends_only_its_own_streams(
    results: dict[str, Any],
) -> None:
    kill = results["kill"]
    ends = kill["ends"]
    assert kill["open_on_it"] > 0, "the kill would have had no effect"
    assert ends.keys() <= {"whole", "cut"}, "tokens were lost or repeated"
    assert 0 < ends["cut"] <= kill["open_on_it"]
    assert kill["late"].keys() == {"whole"}, (
        "a call without a response yet is sent to the other replica"
    )


def test_replicas_that_are_stopped_finish_their_calls(results: dict[str, Any]) -> None:
    """Serve starts a new replica, since it is a new deployment, and ends the two in the middle of
    their calls."""
    scale = results["scale"]
    assert len(scale["open"]) == 2 and all(scale["open"].values())
    assert scale["ends"].keys() == {"whole"}
    assert len(scale["left"]) == 1 and not set(scale["left"]) & set(scale["open"])


def test_a_call_longer_than_the_grace_time_gets_an_error(results: dict[str, Any]) -> None:
    assert results["end"]["whole"] == 0
    (message,) = results["end"]["errors"]
    assert "grace time of 1 s" in message


def test_the_command_serves_until_it_is_stopped() -> None:
    result = results_of("command")
    assert result["same"][0] == 0 and result["same"][1] > 0, "a session has one replica"
    assert result["others"][0] > 0, "sessions have more than one"
    (message,) = result["errors"]
    assert "grace time of 1 s" in message
    assert result["status"] == 0
