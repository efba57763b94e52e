"""Observations of a run: each attack's outcomes, the pauses of honest streams, the memory."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field

from tests.hostile.attacker import Report
from tests.hostile.honest import Pause
from tests.hostile.server import MIB, Kill, Memory

NONE = Memory(0, 0, 0)
GRACE_S = 1.5  # after the next engine is ready, until all streams continue


@dataclass
class Account:
    """The account of one run. Times are by `time.monotonic`; in output they count from
    `begin_s`."""

    begin_s: float = 0.0
    reports: list[Report] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    worker_kills: list[Kill] = field(default_factory=list)  # of fork servers of workers
    pauses: list[Pause] = field(default_factory=list)
    completed: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    files_before: float = 0.0  # open files of the serving process
    before: Memory = NONE
    peak: Memory = NONE
    after: Memory = NONE

    @property
    def ended(self) -> list[Report]:
        return [report for report in self.reports if report.end_s is not None]

    @property
    def outcomes(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for report in self.ended:
            total.update(report.outcomes)
        return total

    def unexcused(self) -> list[Pause]:
        """Return pauses that no kill explains, the longest first."""
        pauses = [
            pause
            for pause in self.pauses
            if all(
                pause.to_s < kill.killed_s or pause.from_s > kill.ready_s + GRACE_S
                for kill in [*self.kills, *self.worker_kills]
            )
        ]
        return sorted(pauses, key=lambda pause: -pause.lasted_s)

    def attacks_during(self, pause: Pause) -> list[str]:
        """Return the attacks that ran during a pause."""
        begun = {(r.attack, r.begin_s): r.end_s for r in self.reports}
        return [
            name
            for (name, begin_s), end_s in begun.items()
            if begin_s < pause.to_s and (end_s is None or end_s > pause.from_s)
        ]

    def describe(self, pause: Pause) -> str:
        at_s, attacks = pause.from_s - self.begin_s, ", ".join(self.attacks_during(pause))
        kind = "before the first event" if pause.first else "between events"
        return (
            f"{pause.lasted_s:.2f} s at {at_s:.1f} s in {pause.stream!r} {kind}, during {attacks}"
        )

    def table(self) -> str:
        lines = [f"{'attack':34}{'runs':>6}{'calls':>7}{'slowest':>10}  outcomes"]
        by_name: dict[str, list[Report]] = {}
        for report in self.ended:
            by_name.setdefault(report.attack, []).append(report)
        for name, reports in sorted(by_name.items()):
            outcomes = sum((Counter(each.outcomes) for each in reports), Counter[str]())
            slowest_s = max(each.slowest_s for each in reports)
            counts = "  ".join(f"{key}: {count}" for key, count in sorted(outcomes.items()))
            count = f"{len(reports):>6}{outcomes.total():>7}"
            lines.append(f"{name:34}{count}{slowest_s:>8.2f} s  {counts}")
        return "\n".join(lines)

    def line(self) -> str:
        """Return the account in JSON."""
        restarts_s = [kill.ready_s - kill.killed_s for kill in self.kills]
        longest = [self.describe(pause) for pause in self.unexcused()[:3]]
        return json.dumps(
            {
                "attacks": len(self.ended),
                "outcomes": dict(sorted(self.outcomes.items())),
                "kills": len(self.kills),
                "slowest_restart_s": max(restarts_s, default=None),
                "honest": self.completed,
                "longest_pauses": longest,
                "mib_before": [round(each / MIB) for each in self.before],
                "mib_peak": [round(each / MIB) for each in self.peak],
                "mib_after": [round(each / MIB) for each in self.after],
                "wrong": len(self.wrong),
            }
        )
