"""The page of a run: its contents, and that a browser draws it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import msgspec
import numpy as np
import pytest

from sim.report.page.view import MAX_POINTS, PageCollector, page, quantiles_of, write_page
from sim.report.report import Record, Report
from sim.report.timeline import Timeline
from tests.sim.test_timeline import run

CHROMIUM = shutil.which("chromium")
NODE = shutil.which("node")


def record(index: int, ttft_s: float, tpot_s: float | None) -> Record:
    return Record(
        index=index,
        arrival_s=index / 10,
        prompt_tokens=10,
        output_tokens=5,
        queue_s=0.0,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        e2e_s=1.0,
        prefix_hit_tokens=0,
        preemptions=0,
    )


@pytest.fixture(scope="module")
def seen() -> tuple[Report, Timeline]:
    timeline = Timeline()
    return run(timeline), timeline


def document(html: str) -> dict[str, object]:
    line = next(line for line in html.splitlines() if line.startswith("const DATA = "))
    data: dict[str, object] = json.loads(line.removeprefix("const DATA = ").removesuffix(";"))
    return data


def test_it_holds_reports_quantiles_and_no_more_points_than_can_be_drawn(
    seen: tuple[Report, Timeline],
) -> None:
    report, timeline = seen
    rng = np.random.default_rng(1)
    times_s = rng.exponential(1.0, 3 * MAX_POINTS)
    collector = PageCollector()
    for index, time_s in enumerate(times_s.tolist()):
        collector(record(index, time_s, None if index % 3 else 0.01))
    view = collector.view("a", report, timeline.series())
    assert view.quantiles["ttft_s"][100] == pytest.approx(np.median(times_s), rel=1e-5)
    assert set(view.quantiles["tpot_s"]) == {0.01}
    assert view.points is not None and view.points.num_requests == len(times_s)
    assert len(view.points.ttft_s) == len(view.points.tpot_s) == MAX_POINTS
    assert view.points.arrival_s == sorted(view.points.arrival_s)
    data = document(page("title", [view]))
    assert data["title"] == "title"
    assert len(page("title", [view])) < 400_000


def test_nothing_measured_is_nothing_drawn(seen: tuple[Report, Timeline]) -> None:
    view = PageCollector().view("empty", seen[0])
    assert view.points is None and view.quantiles["ttft_s"] == []
    assert quantiles_of(np.array([np.nan])) == []


def test_a_name_cannot_leave_the_script(seen: tuple[Report, Timeline]) -> None:
    evil = "</script><script>alert(1)</script><!--"
    html = page(evil, [PageCollector().view(evil, seen[0])])
    assert html.count("</script>") == 1 and document(html)["title"] == evil


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_draws_it(seen: tuple[Report, Timeline], tmp_path: Path) -> None:
    report, timeline = seen
    views = []
    for name in ("first", "second", "third"):
        collector = PageCollector()
        for index in range(40):
            collector(record(index, 0.1 + index / 100, 0.01 + index / 1e4))
        views.append(collector.view(name, report, timeline.series()))
    write_page(tmp_path / "page.html", "three runs", views)
    command = [CHROMIUM or "", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "page.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "<title>three runs</title>" in dom
    for title in ("Time to first token", "Batch", "KV pool", "Lookahead", "Acceptance"):
        assert f"<h2>{title}</h2>" in dom
    assert dom.count('class="series"') >= 3 * 9 and dom.count('class="dot"') >= 240
    assert dom.count('aria-pressed="true"') == 3
    assert "settings of third" in dom and "NaN" not in dom


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_axes_say_what_their_ticks_do_and_the_model_is_named(
    seen: tuple[Report, Timeline], tmp_path: Path
) -> None:
    report, timeline = seen
    settings = {"model": "llama-70b", "gpu": "H100", "cost": "roofline", "draft_model": None}
    report = msgspec.structs.replace(report, settings=settings)
    collector = PageCollector()
    for index in range(40):
        collector(record(index, 0.0002 * 1.3**index, 0.01 + index / 1e4))
    html = page("one run", [collector.view("one", report, timeline.series())])
    script = html.partition('"use strict";')[2].partition("</script>")[0]
    (tmp_path / "page.js").write_text(DOM + script + SHOW, encoding="utf-8")
    shown = json.loads(subprocess.check_output([NODE or "", str(tmp_path / "page.js")], text=True))
    assert shown["subtitle"].endswith(", model llama-70b, gpu H100")
    assert len(shown["charts"]) >= 8
    for title, texts in shown["charts"].items():
        *marks, axis = texts
        assert len(marks) > 3, title
        units = {mark.rpartition(" ")[2] for mark in marks} & {"s", "ms", "µs"}
        assert not units or axis in ("time", "arrival"), (title, axis, units)


# The part of a browser's document that the page uses.
DOM = """
const made = [];
const element = (tag) => {
  const self = { tag, attributes: {}, children: [], textContent: "" };
  self.setAttribute = (name, value) => { self.attributes[name] = value; };
  self.append = (...more) => self.children.push(...more);
  self.replaceChildren = () => { self.children = []; };
  self.addEventListener = () => {};
  made.push(self);
  return self;
};
const places = {};
const document = {
  createElement: element,
  createElementNS: (space, tag) => element(tag),
  getElementById: (name) => places[name] ||= element("div"),
};
"""
SHOW = """
const charts = {};
for (const card of places.charts.children) {
  const svg = card.children.find((child) => child.tag === "svg");
  const texts = svg.children.filter((child) => child.tag === "text");
  charts[card.children[0].textContent] = texts.map((text) => text.textContent);
}
console.log(JSON.stringify({ subtitle: places.subtitle.textContent, charts }));
"""
