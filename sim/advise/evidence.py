"""The worlds of which a recorded run is evidence: step prices, and when the machine was slow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.request.request import MODEL
from cbatch.rerun.drafters import Rerun
from cbatch.rerun.models import DraftSizes
from cbatch.rerun.prices import recorded_prices, with_drafter
from sim.advise.recording import Recording
from sim.advise.scenarios import RecordedWorld, ScenarioSettings
from sim.advise.speed import RecordedSpeed
from sim.cli.costs import read_calibration
from sim.report.report import Objectives

MIN_DRAFTING = 50  # steps with drafts that price the log's own drafter


class Evidence(NamedTuple):
    """A recorded run, the reruns of drafters, the draft's sizes, and a file of `cbatch calibrate`
    with prices that replace those of the log."""

    recording: Recording
    reruns: Mapping[str, Rerun]
    model: DraftSizes | None
    cost: Path | None

    def worlds(self, drafters: Sequence[str], targets: Objectives | None) -> list[RecordedWorld]:
        """Return the world of scenarios, and those of trials. `drafters` are chains."""
        config, texts, worlds = self.recording.engine.config, self.recording.texts, []
        fates = {name: each.fates for name, each in self.reruns.items()}
        for prices, shift in self._prices():
            by_drafter, speed = self._by_drafter(prices, drafters), None
            if self.cost is None:
                own = by_drafter[ScenarioSettings.of(config).drafter or "off"]
                spans, samples = self.recording.spans, self.recording.samples
                speed = RecordedSpeed(spans, samples, own).shifted(shift)
            parts = by_drafter, fates, self.model, speed, targets
            worlds.append(RecordedWorld(config, texts, *parts))
        return worlds

    def _prices(self) -> Iterator[tuple[CostProfile, float]]:
        """Yield prices of all steps, of each half of them, and of the engine's start, each with a
        shift of the machine's speed, as a share of the steps."""
        if self.cost is not None:
            yield read_calibration(self.cost).prices, 0.0
            return
        samples, start = self.recording.samples, self.recording.engine.config.cost_profile
        half = len(samples) // 2
        for part, shift in ((samples, 0.0), (samples[:half], 0.25), (samples[half:], 0.5)):
            if any(sample.target_s > 0 for sample in part):
                yield recorded_prices(part, start), shift
        if start is not None:
            yield start, 0.75

    def _by_drafter(self, prices: CostProfile, drafters: Sequence[str]) -> dict[str, CostProfile]:
        """Return prices by drafter. Drafts have these prices, or were timed in the rerun."""
        samples, config = self.recording.samples, self.recording.engine.config
        has_drafts = sum(sample.work.draft_depth > 0 for sample in samples) >= MIN_DRAFTING
        own = ScenarioSettings.of(config).drafter if has_drafts else None
        own = own if self.cost is None else MODEL
        by_drafter = {"off": prices}
        for chain in drafters:
            timed = self.reruns[chain.split("+")[0]].samples
            by_drafter[chain] = prices if chain == own or not timed else with_drafter(prices, timed)
        return by_drafter
