"""Live view of a running batch for `cbatch demo`: one line of the terminal per sequence."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cbatch.engine.engine import Engine
from cbatch.llm import Batch
from cbatch.system.terminal import escaped
from cbatch.text.outputs import Completion, Output, Speculation

# Colours of the column k, indexed by k; the last colour is for larger k too.
K_COLOURS = ("dim", "cyan", "cyan", "green", "green", "bright_green", "bright_green")


@dataclass
class _Lane:
    title: str
    text: str = ""
    k: int = 0  # of the last step, as `accepted`
    accepted: int = 0
    speculation: Speculation = field(default_factory=Speculation)
    done: bool = False

    def cells(self, text_width: int) -> tuple[Text, Text, Text, Text]:
        share = self.speculation.acceptance
        # One dot per draft token of the last step, filled if it was accepted.
        dots = "●" * self.accepted + "○" * (self.k - self.accepted)
        k = Text(f"{self.k} {dots}", style=K_COLOURS[min(self.k, len(K_COLOURS) - 1)])
        tail = escaped(self.text.replace("\n", "⏎").replace("    ", "⇥"))[-text_width:]
        style = "dim" if self.done else ""
        return (
            Text(self.title, style=style or "yellow"),
            Text("done", style="dim") if self.done else k,
            Text("-" if share is None else f"{share:.0%}", style=style),
            Text(tail, style=style),
        )


class Lanes:
    """Table of at most `num_lanes` sequences. A finished sequence keeps its lane until a new
    sequence needs it. `titles` are keyed by request id."""

    def __init__(self, num_lanes: int, titles: Mapping[str, str]) -> None:
        self._titles, self._num_lanes = titles, num_lanes
        self._lanes: dict[str, _Lane] = {}  # by request id
        self._rows: list[str] = []  # request ids, in order of the table

    def update(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            lane = self._lanes.get(output.request_id)
            if lane is None:
                lane = self._enter(output.request_id)
            else:
                lane.k, lane.accepted = output.num_drafted, output.num_accepted
                lane.speculation.observe(output.num_drafted, output.num_accepted)
            lane.text += output.text
            lane.done = output.finished is not None

    def _enter(self, request_id: str) -> _Lane:
        ended = [row for row, name in enumerate(self._rows) if self._lanes[name].done]
        if ended and len(self._rows) == self._num_lanes:
            self._rows[ended[0]] = request_id
        else:
            self._rows.append(request_id)
        return self._lanes.setdefault(request_id, _Lane(self._titles[request_id]))

    def render(self, engine: Engine, elapsed_s: float, width: int) -> Group:
        table = Table(expand=True, box=None, padding=(0, 1), header_style="bold")
        table.add_column("", width=2, justify="right", style="dim")
        table.add_column("", width=18, no_wrap=True)
        table.add_column("k", width=8, no_wrap=True)
        table.add_column("accepted", width=8, justify="right")
        table.add_column("text", ratio=1, no_wrap=True)
        for number, name in enumerate(self._rows):
            table.add_row(str(number), *self._lanes[name].cells(max(width - 48, 20)))
        stats = engine.stats
        mean = stats.speculation.mean_accepted_tokens
        words = [
            f"step {stats.steps:,}",
            f"{stats.output_tokens:,} tokens",
            f"{engine.scheduler.num_running} running",
            f"{engine.scheduler.num_waiting} waiting",
            f"{stats.output_tokens / elapsed_s:,.0f} tokens/s" if elapsed_s > 0 else "",
            f"{mean:.2f} tokens a step and sequence" if mean else "",
        ]
        return Group(Text("  ·  ".join(w for w in words if w), style="bold"), table)


def watch(
    engine: Engine,
    batch: Batch[str],
    titles: Mapping[str, str],
    console: Console,
    num_lanes: int,
    pace_s: float,
) -> tuple[dict[str, Completion], float]:
    """Step the engine until `batch` is done, and draw its lanes if `console` is a terminal.

    Returns the completions by key, and the seconds spent in steps. A step that is drawn takes at
    least `pace_s` seconds. `titles` have the batch's keys."""
    names = {request_id: titles[key] for request_id, (key, *_) in batch.waiting.items()}
    lanes = Lanes(num_lanes, names)
    done: dict[str, Completion] = {}
    live = Live(console=console, refresh_per_second=20) if console.is_terminal else None
    elapsed_s = 0.0
    with live or contextlib.nullcontext():
        while batch.waiting:
            started_s = time.perf_counter()
            outputs = engine.step()
            step_s = time.perf_counter() - started_s
            elapsed_s += step_s
            done |= batch.take(outputs)
            if live is not None:
                lanes.update(outputs)
                live.update(lanes.render(engine, elapsed_s, console.width))
                time.sleep(max(pace_s - step_s, 0.0))
    return done, elapsed_s
