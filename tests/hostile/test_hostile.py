"""The server survives any calls and any deaths of the engine. Honest streams are correct to the
byte, and all resources are released at the end."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.hostile.account import Account
from tests.hostile.attacks import NAMES
from tests.hostile.hour import REST_S, disturb, look_after, references, warm_up
from tests.hostile.server import MIB, served

LONGEST_PAUSE_S = 1.0
MOST_GROWTH_BYTES = 64 * MIB
# Statuses that must all have occurred in responses to attacks.
SEEN = {"200", "400", "401", "404", "405", "408", "413", "415", "429", "503"}
CHEAP = [
    *("crowd", "short times", "wrong keys", "random bodies", "odd values", "paths and methods"),
    *("leave", "cut bodies", "half heads", "pipelined", "broken requests"),
    *("conversations", "odd blocks", "half streams"),
]


def besiege(
    folder: Path, names: list[str], *, seconds: float, seed: int, kills: int, rest_s: float
) -> Account:
    account = Account()
    with served(folder) as server:
        expected = references(server)
        account.before = warm_up(server, expected, account, rest_s)
        print(f"before: {account.before}", flush=True)
        disturb(
            server,
            expected,
            account,
            seconds=seconds,
            seed=seed,
            names=names,
            kill_every_s=seconds / (kills + 1),
        )
        if server.alive:
            look_after(server, expected, account, rest_s)
        else:
            status = server.process.returncode
            account.wrong.insert(0, f"the server ended with {status}: {server.last_words()}")
    print(account.table(), account.line(), sep="\n")
    return account


def require(wrong: list[str], account: Account, names: list[str]) -> None:
    """Check that there is no fault, and that all expected events occurred."""
    assert not wrong, "\n".join(f"{count} times {each}" for each, count in Counter(wrong).items())
    assert account.kills and min(account.completed.values()) > 0
    assert {report.attack for report in account.ended} == set(names)


@pytest.mark.slow
def test_ten_hostile_seconds(tmp_path: Path) -> None:
    """Only cheap attacks run. Times and memory are not checked, since they depend on the machine's
    load."""
    account = besiege(tmp_path, CHEAP, seconds=10, seed=0, kills=1, rest_s=0.0)
    require(account.wrong, account, CHEAP)


@pytest.mark.hostile
@pytest.mark.slow
def test_a_hostile_hour(tmp_path: Path) -> None:
    """`CBATCH_HOSTILE_S` is its duration, `CBATCH_HOSTILE_ONLY` its attacks (separated by ;)."""
    seconds = float(os.environ.get("CBATCH_HOSTILE_S", "600"))
    seed = int(os.environ.get("CBATCH_HOSTILE_SEED", "0"))
    only = os.environ.get("CBATCH_HOSTILE_ONLY")
    names = NAMES if only is None else [each.strip() for each in only.split(";")]
    assert set(names) <= set(NAMES), f"there are {'; '.join(NAMES)}"
    account = besiege(
        tmp_path, names, seconds=seconds, seed=seed, kills=max(1, int(seconds / 60)), rest_s=REST_S
    )
    wrong = list(account.wrong)
    wrong += [account.describe(p) for p in account.unexcused() if p.lasted_s > LONGEST_PAUSE_S][:5]
    grown = account.after.total - account.before.total
    if grown > MOST_GROWTH_BYTES:
        wrong.append(f"memory was {account.before}, is {account.after}")
    require(wrong, account, names)
    assert only is not None or set(account.outcomes) >= SEEN
