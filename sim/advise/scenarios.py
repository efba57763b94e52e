"""Scenarios: the recorded arrivals and texts, served by other settings on the same machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from msgspec.structs import replace

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.request.request import MODEL
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.speculation.build import lookahead_name, parse_lookahead
from cbatch.rerun.drafters import Fates
from cbatch.rerun.models import DraftSizes
from sim.advise.recording import FIGURES, figures
from sim.advise.speed import PacedExecutor, RecordedSpeed
from sim.advise.texts import RecordedDrafts, RecordedTokens, Texts, as_traced
from sim.executor.fake import FakeExecutor
from sim.replay.replay import replay
from sim.report.report import Objectives, Record
from sim.report.timeline import Observer
from sim.workload.sources import OpenLoop

SIMILAR = 0.01  # relative difference in goodput or tokens/s that is none
MAX_TRIED = 3  # settings whose trials show that they can be worse than the recorded ones
SHORTER = WORSE = 0.05  # relative difference in p95 TPOT that counts, and in p95 TTFT if longer
Row = dict[str, Any]  # the settings of a scenario and its figures, by name


class ScenarioSettings(NamedTuple):
    """The settings that scenarios vary. `drafter`: names joined by "+"; None with `off`."""

    lookahead: str
    drafter: str | None
    max_num_seqs: int
    max_num_batched_tokens: int
    itl_target_s: float | None

    @classmethod
    def of(cls, config: SchedulerConfig) -> ScenarioSettings:
        names = "+".join(config.default_chain)
        lookahead = lookahead_name(config.lookahead) if names else "off"
        sizes = config.max_num_seqs, config.max_num_batched_tokens, config.itl_target_s
        return cls(lookahead, None if lookahead == "off" else names, *sizes)


class RecordedWorld(NamedTuple):
    """All that scenarios share. `prices` are by chain, "off" for none; `fates` by drafter, then by
    text. A world of which the log is evidence, too, has other prices, and is slow at other times.
    In trials, settings are served in such worlds."""

    config: SchedulerConfig
    texts: Texts
    prices: Mapping[str, CostProfile]
    fates: Mapping[str, Mapping[str, Fates]]
    model: DraftSizes | None = None
    speed: RecordedSpeed | None = None
    targets: Objectives | None = None  # for the goodput

    def config_of(self, settings: ScenarioSettings) -> SchedulerConfig:
        """Return the configuration of an engine with these settings."""
        recorded, drafter, changes = ScenarioSettings.of(self.config), settings.drafter, {}
        if drafter is not None:
            start = self.config.cost_profile if drafter == recorded.drafter else None
            changes["cost_profile"] = start or self.prices[drafter]
            changes["drafter"] = tuple(drafter.split("+"))
            if MODEL in changes["drafter"] and self.model is not None:
                changes["draft_context_tokens"] = self.model.context_tokens
                changes["catch_up_price"] = self.model.catch_up_price
                changes["draft_lags"] = not self.model.is_head
        none = {"drafter": None, "draft_context_tokens": None, "cost_profile": None}
        slots, budget = settings.max_num_seqs, settings.max_num_batched_tokens
        sizes = {"max_num_seqs": slots, "max_num_batched_tokens": max(budget, slots)}
        lookahead = self.config.lookahead
        if settings.lookahead != recorded.lookahead:
            lookahead = parse_lookahead(settings.lookahead)
        more = {"lookahead": lookahead, "itl_target_s": settings.itl_target_s, "kv_events": False}
        return replace(self.config, **(none | changes | sizes | more))

    def serve(self, settings: ScenarioSettings, observers: Sequence[Observer] = ()) -> Row:
        """Serve the recorded arrivals with these settings. Return the settings and the figures."""
        config, records = self.config_of(settings), list[Record]()
        report = replay(
            OpenLoop(map(as_traced, self.texts.values())),
            config,
            self._executor(config, settings.drafter),
            on_record=records.append,
            observers=observers,
            make_request=lambda number, _: self.texts[str(number)].request,
        )
        drafts = report.speculation
        times = [(record.ttft_s, record.tpot_s, record.e2e_s) for record in records]
        measures: Row = figures(report.output_tokens, report.duration_s, times, self.targets)
        measures["drafted_tokens"] = 0 if drafts is None else drafts.drafted_tokens
        measures["accepted_tokens"] = 0 if drafts is None else drafts.accepted_tokens
        return settings._asdict() | measures

    def _executor(self, config: SchedulerConfig, drafter: str | None) -> FakeExecutor:
        slots, acceptance = config.max_num_seqs, None
        if drafter is not None:
            sizes = () if self.model is None else (self.model.context_tokens, self.model.is_head)
            chain = drafter.split("+")
            acceptance = RecordedDrafts(self.texts, chain, self.fates, slots, *sizes)
        parts: dict[str, Any] = {
            "max_num_seqs": slots,
            "cost": self.prices[drafter or "off"],
            "acceptance": acceptance,
            "tokens": RecordedTokens(self.texts, slots),
        }
        return FakeExecutor(**parts) if self.speed is None else PacedExecutor(self.speed, **parts)


def largest_errors(rows: Iterable[Row], measured: Row) -> dict[str, float]:
    """Return the largest error of each figure, relative to the measured one."""
    errors = dict.fromkeys(FIGURES, 0.0)
    for row, name in product(rows, FIGURES):
        if row[name] and measured[name]:
            errors[name] = max(errors[name], abs(row[name] / measured[name] - 1))
    return errors


def search(
    recorded: ScenarioSettings,
    choices: Mapping[str, Sequence[Any]],
    run: Callable[[list[ScenarioSettings]], Iterable[Row]],
    trials: Callable[[ScenarioSettings], Iterable[Row]],
) -> list[Row]:
    """Try the recorded settings, then every lookahead with every drafter, then the other `choices`,
    by setting, each with the best settings so far. Return the rows, the best first, and equal ones
    as one; `ratio` is tokens/s relative to the recorded settings.

    The best must not be worse than the recorded settings in tokens/s and p95 TPOT in any of its
    `trials`; else the next is tried, up to `MAX_TRIED`. `errors` are those of the best's trials."""
    rows: dict[ScenarioSettings, Row] = {}

    def attempt(settings: Iterable[ScenarioSettings]) -> ScenarioSettings:
        new = [each for each in dict.fromkeys(settings) if each not in rows]
        rows.update(zip(new, run(new) if new else (), strict=True))
        best = ranked([*rows.values()], rows[recorded])[0]
        return next(each for each, row in rows.items() if row is best)

    pairs = product(choices["lookahead"], choices["drafter"] or (None,))
    speculating = [
        recorded._replace(lookahead=lookahead, drafter=None if lookahead == "off" else drafter)
        for lookahead, drafter in pairs
        if drafter is not None or lookahead == "off"
    ]
    best = attempt([recorded, *speculating])
    for name in ("max_num_seqs", "max_num_batched_tokens", "itl_target_s"):
        best = attempt(best._replace(**{name: value}) for value in choices[name])
    own = rows[recorded]
    for row in rows.values():
        row["ratio"] = (row["tokens_per_s"] or 0.0) / (own["tokens_per_s"] or 1.0)
    all_rows, refused = merged(rows.values()), list[Row]()
    while (first := ranked(all_rows, own, refused)[0]) is not own:
        tried = list(trials(ScenarioSettings(**first["same"][0])))
        if not any(is_worse(row, own, FIGURES[:2]) for row in tried):
            first["errors"] = largest_errors(tried, first)
            break
        refused += [first] if len(refused) < MAX_TRIED else all_rows
    return ranked(all_rows, own, refused)


def merged(rows: Iterable[Row]) -> list[Row]:
    """Return one row for all with equal figures: the first. `same` are the settings of all."""
    groups: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        settings = {name: row[name] for name in ScenarioSettings._fields}
        figures = tuple(value for name, value in row.items() if name not in settings)
        groups.setdefault(figures, row).setdefault("same", []).append(settings)
    return list(groups.values())


def is_worse(row: Row, recorded: Row, names: Sequence[str] = FIGURES) -> bool:
    """Return whether a row has fewer tokens/s, or longer p95 latencies, than the recorded one."""
    ratios = [_value(row, name) / (_value(recorded, name) or 1.0) for name in names]
    return ratios[0] < 1 - SIMILAR or any(ratio > 1 + WORSE for ratio in ratios[1:])


def _value(row: Row, name: str) -> float:
    return row.get(name) or 0.0


def ranked(rows: Sequence[Row], recorded: Row, refused: Sequence[Row] = ()) -> list[Row]:
    """Return the rows, the best first, then by goodput or tokens/s.

    Without targets the best is no worse than the `recorded` settings (`is_worse`). It has nearly
    the most goodput and then tokens/s (`SIMILAR`), and of those the shortest gaps (p95 TPOT). The
    recorded settings are the best if no others have more, or much shorter gaps (`SHORTER`)."""

    def near_most(rows: list[Row], name: str) -> list[Row]:
        least = (1 - SIMILAR) * max(_value(row, name) for row in rows)
        return [row for row in rows if _value(row, name) >= least]

    by = "goodput_per_s" if "goodput_per_s" in recorded else "tokens_per_s"
    ordered = sorted(rows, key=lambda row: -_value(row, by))
    fair = [row for row in ordered if row is recorded or all(row is not each for each in refused)]
    if by == "tokens_per_s":
        fair = [row for row in fair if row is recorded or not is_worse(row, recorded)]
    top = near_most(near_most(fair, by), "tokens_per_s")
    best = min(top, key=lambda row: _value(row, "tpot_p95_s"))
    pairs = [(_value(best, name), _value(recorded, name)) for name in (by, "tokens_per_s")]
    more = any(new > (1 + SIMILAR) * old for new, old in pairs)
    shorter_s = (1 - SHORTER) * _value(recorded, "tpot_p95_s")
    if not more and _value(best, "tpot_p95_s") >= shorter_s:
        best = next((row for row in near_most(fair, by) if row is recorded), best)
    return [best, *(row for row in ordered if row is not best)]
