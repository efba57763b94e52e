"""A recorded run, as its scenarios replay it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from cbatch.core.prices.step_work import StepSample
from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import MODEL
from cbatch.core.scheduler.events import Configured
from cbatch.rerun.drafters import Fates, Output
from cbatch.steplog.recorded_run import DraftedRow, RecordedText, Span, read_runs
from cbatch.steplog.step_log import StepLogError, is_step_log
from sim.report.report import Objectives
from sim.workload.tokens import VOCAB_SIZE

FIGURES = ("tokens_per_s", "tpot_p95_s", "ttft_p95_s")
Figures = dict[str, float | None]
Times = tuple[float, float | None, float]  # TTFT, TPOT and E2E of a request, in seconds
REMEDY = "record a run with cbatch serve --record FILE"
# Not replayed: they do not matter to a scheduler, need a grammar, or are settings of a scenario.
_DROPPED: dict[str, Any] = {"structured_outputs": None, "logprobs": None, "prompt_logprobs": None}
_DROPPED |= {"stop": (), "drafter": None, "max_lookahead": None}


class Recording(NamedTuple):
    """A recorded run. The name of a text, its request's id, is its number by arrival."""

    engine: Configured
    texts: dict[str, RecordedText]
    samples: list[StepSample]
    spans: list[Span]  # of the steps of `samples`
    drafts: list[DraftedRow]
    warnings: list[str]

    @property
    def outputs(self) -> list[Output]:
        return [(text.request, text.output) for text in self.texts.values()]

    def figures(self, targets: Objectives | None = None) -> Figures:
        texts = self.texts.values()
        timed = [text for text in texts if text.first_s <= text.last_s]
        times = [
            (
                text.first_s - text.arrival_s,
                (text.last_s - text.first_s) / (n - 1) if (n := len(text.output)) > 1 else None,
                text.last_s - text.arrival_s,
            )
            for text in timed
        ]
        duration_s = max((text.last_s for text in timed), default=0.0)
        return figures(sum(len(text.output) for text in texts), duration_s, times, targets)

    def compare(self, drafter: str, fates: dict[str, Fates], k: int) -> tuple[int, int]:
        """Return how many recorded rows the rerun drafter drafted, and how many of them have
        another fate in the rerun."""
        rows = self.drafts if self.engine.config.default_chain == (drafter,) else []
        verdicts = [_agrees(row, fates, drafter, k) for row in rows]
        return len(verdicts) - verdicts.count(None), verdicts.count(False)


def _agrees(row: DraftedRow, fates: dict[str, Fates], drafter: str, k: int) -> bool | None:
    """Return whether a recorded row has the fate of the rerun. Return None if that is unknown: the
    draft model lagged, the row drafted more than `k` tokens, or its drafts reach the end of a text
    that was cut."""
    text, left = row.text, len(row.text.output) - row.position
    lagged = drafter == MODEL and not row.drafted
    if lagged or row.planned > k or left <= row.planned * text.cut:
        return None
    drafted, accepted = (int(each[row.position]) for each in fates[text.request.request_id])
    drafted = min(row.planned, drafted)
    return (row.drafted, min(row.accepted, left)) == (drafted, min(drafted, accepted, left))


def figures(
    tokens: int, duration_s: float, times: Sequence[Times], targets: Objectives | None = None
) -> Figures:
    """Return the figures of a run, recorded or simulated; None if there is no measurement. With
    `targets` the goodput is among them: requests per second that meet all of them."""

    def p95(place: int) -> float | None:
        values = [each[place] for each in times if each[place] is not None]
        return float(np.percentile(np.array(values, np.float64), 95)) if values else None

    if duration_s <= 0:
        return dict.fromkeys((*FIGURES, "goodput_per_s"))
    result = {"tokens_per_s": tokens / duration_s, "tpot_p95_s": p95(1), "ttft_p95_s": p95(0)}
    if targets is not None:
        limits = targets.ttft_s, targets.tpot_s, targets.e2e_s
        good = [
            all(
                t is None or limit is None or t <= limit
                for t, limit in zip(each, limits, strict=True)
            )
            for each in times
        ]
        result["goodput_per_s"] = sum(good) / duration_s
    return result


def read_run(path: Path, on_step: Callable[[int], object] = int) -> Recording:
    """Read the longest run in a log. `on_step` gets the number of steps so far. Raises
    `FieldError`."""
    if not is_step_log(path):
        raise FieldError("LOG", f"{path} is not a step log, and has no texts", REMEDY)
    try:
        runs, warning = read_runs(path, on_step)
    except StepLogError as error:
        raise FieldError("LOG", str(error), REMEDY) from error
    run = max(runs, key=lambda run: len(run.samples), default=None)
    ordered = [] if run is None else sorted(run.texts, key=lambda text: text.arrival_s)
    texts = [text for text in ordered if text.output]
    if run is None or not texts:
        raise FieldError("LOG", f"{path} has no request with output", REMEDY)
    if run.configured.config.vocab_size >= VOCAB_SIZE:
        raise FieldError("LOG", f"{path} is of a simulation, and has no texts", REMEDY)
    first_s = texts[0].arrival_s
    for number, text in enumerate(texts):
        _as_replayed(text, str(number), first_s)
    warnings = [] if warning is None else [warning]
    if len(runs) > 1:
        warnings.append(f"of {len(runs)} runs in the log, only the longest is used")
    named = {text.request.request_id: text for text in texts}
    drafts = [row for row in run.drafts if row.text.output]
    spans = [(start_s - first_s, end_s - first_s) for start_s, end_s in run.spans]
    return Recording(run.configured, named, run.samples, spans, drafts, warnings)


def _as_replayed(text: RecordedText, name: str, first_s: float) -> None:
    """Give the text's request another id and the parameters with which it is replayed. Let time
    begin at `first_s`. A text that is cut ends at its length."""
    params = replace(text.request.params, **_DROPPED)
    if text.cut:
        limits = {"max_tokens": len(text.output), "min_tokens": 0}
        params = replace(params, **limits, ignore_eos=True, stop_token_ids=())
    text.request = replace(text.request, request_id=name, params=params)
    text.arrival_s, text.first_s, text.last_s = (
        at_s - first_s for at_s in (text.arrival_s, text.first_s, text.last_s)
    )
