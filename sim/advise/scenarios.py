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
from sim.advise.recording import figures
from sim.advise.speed import PacedExecutor, RecordedSpeed
from sim.advise.texts import RecordedDrafts, RecordedTokens, Texts, as_traced
from sim.executor.fake import FakeExecutor
from sim.replay.replay import replay
from sim.report.report import Record
from sim.report.timeline import Observer
from sim.workload.sources import OpenLoop

SIMILAR = 0.01  # relative difference in tokens/s below which the shorter gaps decide
SHORTER = 0.05  # gaps shorter by this share are a reason to change settings
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
    text."""

    config: SchedulerConfig
    texts: Texts
    prices: Mapping[str, CostProfile]
    fates: Mapping[str, Mapping[str, Fates]]
    model: DraftSizes | None = None
    speed: RecordedSpeed | None = None

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
        measures = figures(
            report.output_tokens,
            report.duration_s,
            [record.ttft_s for record in records],
            [record.tpot_s for record in records if record.tpot_s is not None],
        )
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


def search(
    recorded: ScenarioSettings,
    choices: Mapping[str, Sequence[Any]],
    run: Callable[[list[ScenarioSettings]], Iterable[Row]],
) -> list[Row]:
    """Try the recorded settings, then every lookahead with every drafter, then the other `choices`,
    by setting, each with the best settings so far. Return the rows, the best first; `ratio` is
    tokens/s relative to the recorded settings."""
    rows: dict[ScenarioSettings, Row] = {}

    def attempt(settings: Iterable[ScenarioSettings]) -> ScenarioSettings:
        new = [each for each in dict.fromkeys(settings) if each not in rows]
        rows.update(zip(new, run(new) if new else (), strict=True))
        best = ranked(rows.values(), rows[recorded])[0]
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
    for row in rows.values():
        row["ratio"] = (row["tokens_per_s"] or 0.0) / (rows[recorded]["tokens_per_s"] or 1.0)
    return ranked(rows.values(), rows[recorded])


def ranked(rows: Iterable[Row], recorded: Row) -> list[Row]:
    """Return the rows by tokens/s, the most first. The best is the one with the shortest gaps (p95
    TPOT) among those with nearly the most (`SIMILAR`). The `recorded` settings stay the best while
    they are among those, and their gaps are nearly the shortest (`SHORTER`)."""
    ordered = sorted(rows, key=lambda row: -(row["tokens_per_s"] or 0.0))
    least = (1 - SIMILAR) * (ordered[0]["tokens_per_s"] or 0.0)
    close = [row for row in ordered if (row["tokens_per_s"] or 0.0) >= least]
    best = min(close, key=lambda row: row["tpot_p95_s"] or 0.0)
    min_s = (1 - SHORTER) * (recorded["tpot_p95_s"] or 0.0)
    if any(row is recorded for row in close) and min_s <= (best["tpot_p95_s"] or 0.0):
        best = recorded
    return [best, *(row for row in ordered if row is not best)]
