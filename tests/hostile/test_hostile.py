"""The server survives any calls and any deaths of the engine. Honest streams are correct to the
byte, and all resources are released at the end."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.hostile import attacks  # noqa: F401 - it fills `ATTACKS`
from tests.hostile.attacker import ATTACKS
from tests.hostile.server import served
from tests.hostile.siege import MIB, REST_S, Siege

LONGEST_PAUSE_S = 1.0
MAX_GROWTH_BYTES = 64 * MIB
# Statuses that must all have occurred in responses to attacks.
SEEN = {"200", "400", "401", "404", "405", "408", "413", "415", "429", "503"}
CHEAP = [
    *("crowd", "short times", "random bodies", "odd values", "odd heads", "conversations"),
    *("leave", "half heads", "pipelined", "broken requests"),
]


def besiege(
    folder: Path, names: list[str], *, seconds: float, seed: int, kills: int, rest_s: float
) -> tuple[Siege, int]:
    """Attack a server; return the siege, and by how many bytes the memory has grown."""
    grown = 0
    with served(folder) as server:
        siege = Siege(server)
        before = siege.warm_up(rest_s) if rest_s else []
        siege.attack(names, seconds=seconds, seed=seed, kills=kills)
        if server.alive:
            grown = sum(siege.look_after(rest_s)) - sum(before)
    print(siege.table())
    return siege, grown


def require(siege: Siege, names: list[str], wrong: list[str]) -> None:
    """Check that there is no fault, and that all expected events occurred."""
    assert not wrong, "\n".join(f"{count} times {each}" for each, count in Counter(wrong).items())
    assert siege.kills and min(siege.completed.values()) > 0
    assert {each["attack"] for each in siege.reports if each["end_s"] is not None} == set(names)


@pytest.mark.slow
def test_five_hostile_seconds(tmp_path: Path) -> None:
    """Only cheap attacks run. Times and memory are not checked, since they depend on the machine's
    load."""
    siege, _ = besiege(tmp_path, CHEAP, seconds=5, seed=0, kills=1, rest_s=0.0)
    require(siege, CHEAP, siege.wrong)


@pytest.mark.hostile
@pytest.mark.slow
def test_a_hostile_hour(tmp_path: Path) -> None:
    """`CBATCH_HOSTILE_S` is its duration, `CBATCH_HOSTILE_ONLY` its attacks (separated by ;)."""
    seconds = float(os.environ.get("CBATCH_HOSTILE_S", "600"))
    seed = int(os.environ.get("CBATCH_HOSTILE_SEED", "0"))
    only = os.environ.get("CBATCH_HOSTILE_ONLY")
    names = [*ATTACKS] if only is None else [each.strip() for each in only.split(";")]
    assert set(names) <= set(ATTACKS), f"there are {'; '.join(ATTACKS)}"
    kills = max(1, int(seconds / 60))
    siege, grown = besiege(tmp_path, names, seconds=seconds, seed=seed, kills=kills, rest_s=REST_S)
    pauses = [p for p in siege.unexcused() if float(p.split()[0]) > LONGEST_PAUSE_S][:5]
    wrong = [*siege.wrong, *pauses]
    if grown > MAX_GROWTH_BYTES:
        wrong.append(f"memory grew by {grown} bytes")
    require(siege, names, wrong)
    assert only is not None or set(siege.outcomes) >= SEEN
