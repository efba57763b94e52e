"""The live page in a browser: it shows running requests, and its prompt box completes text."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cbatch.server.http.keys import KeyRing
from tests.browser import MISSING, browsing, until
from tests.process.factories import SimFactory
from tests.server.http_client import Client, serving, wait_until
from tests.server.processes import serving_process
from tests.server.test_app import PROMPT, ROOMY, SlowEngine
from tests.toy_engine import TOKENIZER, make_engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]
LONG = {"prompt": PROMPT, "max_tokens": 3000, "stream": True, "seed": 3, "ignore_eos": True}

# Count the pixels of a canvas in each of the page's colours.
INK = """(() => {
  const style = getComputedStyle(document.documentElement), found = {};
  const canvas = document.querySelector(%s);
  const copy = new OffscreenCanvas(canvas.width, canvas.height);
  const pen = copy.getContext("2d", { willReadFrequently: true });
  pen.drawImage(canvas, 0, 0);
  const names = ["own", "accepted", "rejected", "cached"];
  const wanted = names.map((name) => {
    const hex = parseInt(style.getPropertyValue(`--${name}`).trim().slice(1), 16);
    found[name] = 0;
    return [name, hex >> 16, (hex >> 8) & 255, hex & 255];
  });
  const { data } = pen.getImageData(0, 0, canvas.width, canvas.height);
  for (let i = 0; i < data.length; i += 4)
    for (const [name, r, g, b] of wanted)
      if (data[i + 3] === 255 && data[i] === r && data[i + 1] === g && data[i + 2] === b)
        found[name]++;
  return found;
})()"""


Tab = tuple[Any, list[str]]  # a playwright page, and the output of its console and scripts


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with browsing() as tab:
        yield tab


@contextmanager
def opened(tab: Tab, client: Client, *, dark: bool = False) -> Iterator[Any]:
    page, log = tab
    log.clear()
    page.set_viewport_size({"width": 1400, "height": 900})
    page.emulate_media(color_scheme="dark" if dark else "light")
    page.goto(f"http://127.0.0.1:{client.port}/")
    until(page, "document.getElementById('state').textContent !== 'connecting'")
    try:
        yield page
        # The end of the previous page's stream may be logged late.
        complaints = [line for line in log if "/live" not in line or f":{client.port}/" in line]
        assert complaints == [], "of the console, or of the content policy"
    finally:
        page.goto("about:blank")


def text_of(page: Any, name: str) -> str:
    return str(page.evaluate(f"document.getElementById({name!r}).innerText"))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_slots_show_tokens_accepted_and_rejected(
    tab: Tab, monkeypatch: pytest.MonkeyPatch, dark: bool
) -> None:
    slow = SlowEngine(monkeypatch, lookahead="fixed:3", **ROOMY)
    with serving(slow.engine) as client, opened(tab, client, dark=dark) as page:
        until(page, "!document.getElementById('idle').hidden")
        assert page.evaluate("document.querySelectorAll('#rows li').length") == 0
        with client.open(LONG), client.open(LONG | {"seed": 4}):
            until(page, "document.querySelectorAll('#rows li:not(.idle)').length === 2")
            until(page, "document.querySelector('#rows .share b').textContent.endsWith('%')")
            until(page, "document.querySelector('#v-accepted').innerText.endsWith('%')")
            row = text_of(page, "rows").split()
            assert (
                row[0] == "slot" and "k 3" in " ".join(row) and "drafts accepted" in " ".join(row)
            )
            for name in ("accepted", "rejected", "own"):
                until(page, f"{INK % json.dumps('#rows canvas')}.{name} > 50")
            # The first frame was from an idle engine; these values change with the next frame.
            until(page, f"{INK % json.dumps('#c-pool')}.accepted > 20")
            until(page, "document.getElementById('v-load').innerText.includes('2 of')")
            assert PROMPT not in str(page.evaluate("document.getElementById('rows').outerHTML"))
        until(page, "document.querySelectorAll('#rows li:not(.idle)').length === 0")


def test_without_drafts_no_acceptance_is_shown(tab: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowEngine(monkeypatch, lookahead="off", **ROOMY)
    with serving(slow.engine) as client, opened(tab, client) as page, client.open(LONG):
        until(page, "document.querySelectorAll('#rows li:not(.idle)').length === 1")
        until(page, "document.querySelector('#v-k').innerText.startsWith('0.0')")
        assert text_of(page, "v-accepted") == "–"
        ink = page.evaluate(INK % json.dumps("#rows canvas"))
        assert ink["own"] > 20 and ink["accepted"] == ink["rejected"] == 0
        assert page.evaluate("document.querySelector('#rows .share b').textContent") == "–"
        assert page.evaluate("document.getElementById('policy').hidden")


def test_the_prompt_box_shows_the_completion(tab: Tab, demo_client: Client) -> None:
    """It can be used by keyboard alone, and text that looks like HTML stays text."""
    client = demo_client
    prompt = '<img src=x onerror="document.title = 1">'
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0}
    with opened(tab, client) as page:
        page.evaluate("document.getElementById('prompt').focus()")
        page.evaluate("document.getElementById('prompt').select()")
        page.keyboard.insert_text(prompt)
        page.evaluate("document.getElementById('max-tokens').value = 24")
        page.keyboard.press("Control+Enter")
        until(page, "document.getElementById('result').textContent.startsWith('24 tokens in')")
        expected = prompt + client.post(body)[1]["choices"][0]["text"]
        assert page.evaluate("document.getElementById('answer').textContent") == expected
        assert page.evaluate("document.querySelectorAll('#answer img').length") == 0
        page.evaluate("document.getElementById('max-tokens').max = ''")
        page.evaluate("document.getElementById('max-tokens').value = 99999999999")
        page.keyboard.press("Control+Enter")
        until(page, "document.getElementById('result').classList.contains('wrong')")
        assert "max_tokens" in text_of(page, "result")
        tab[1].clear()  # the browser logs the answer of 400


def test_a_completion_is_marked_among_the_slots_and_can_be_stopped(
    tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowEngine(monkeypatch, **ROOMY)
    with serving(slow.engine) as client, opened(tab, client) as page, client.open(LONG):
        until(page, "document.querySelectorAll('#rows li:not(.idle)').length === 1")
        page.evaluate("document.getElementById('max-tokens').value = 3000")
        page.evaluate("document.getElementById('prompt-form').requestSubmit()")
        until(page, "document.querySelectorAll('#rows li.mine').length === 1")
        assert page.evaluate("document.querySelector('#rows .mine .slot').textContent") == "slot 1"
        page.keyboard.press("Escape")
        until(page, "document.getElementById('result').textContent === 'Stopped.'")
        until(page, "document.querySelectorAll('#rows li:not(.idle)').length === 1")
        assert slow.engine.scheduler.num_running == 1


def test_the_page_asks_for_a_key(tab: Tab) -> None:
    with serving(make_engine(), keys=KeyRing(["right"])) as client, opened(tab, client) as page:
        for key, state in (("wrong", "needs a key"), ("right", "running")):
            until(page, "!document.getElementById('key').hidden")
            page.evaluate(f"document.getElementById('key-field').value = {key!r}")
            page.evaluate("document.getElementById('key').requestSubmit()")
            until(page, f"document.getElementById('state').textContent === {state!r}")
        until(page, "document.getElementById('key').hidden")
        page.evaluate("document.getElementById('prompt-form').requestSubmit()")
        until(page, "document.getElementById('result').textContent.includes('tokens in')")
        page.evaluate("sessionStorage.clear()")
        tab[1].clear()  # the browser logs each answer of 401


def test_the_page_continues_after_the_engine_is_killed(tab: Tab) -> None:
    factory = SimFactory(vocab_size=TOKENIZER.vocab_size, step_s=0.005)
    with (
        serving_process(factory) as served,
        opened(tab, served.client) as page,
        served.client.open(LONG | {"max_tokens": 480}),
    ):
        until(page, "document.querySelectorAll('#rows li:not(.idle)').length === 1")
        assert served.engine.pid is not None
        os.kill(served.engine.pid, signal.SIGKILL)
        until(page, "document.getElementById('state').textContent === 'running, 1 restart'")
        until(page, "document.querySelectorAll('#rows li:not(.idle)').length === 1")


def test_the_content_policy_blocks_inline_scripts_and_other_hosts(tab: Tab) -> None:
    with serving(make_engine()) as client:
        with opened(tab, client):
            pass
        inline = (
            "document.body.append(Object.assign(document.createElement('script'), {text: 's'}))"
        )
        outside = "fetch('http://127.0.0.1:1/').catch((error) => 'refused')"
        for script in (inline, outside):
            with pytest.raises(AssertionError, match="policy"), opened(tab, client) as page:
                page.evaluate(script)
                wait_until(lambda: page.evaluate("1") == 1 and bool(tab[1]))


@pytest.mark.parametrize("width", [360, 700, 1000, 1800])
def test_nothing_overflows_at_any_width(
    tab: Tab, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    slow = SlowEngine(monkeypatch, lookahead="fixed:3", **ROOMY)
    with serving(slow.engine) as client, opened(tab, client) as page, client.open(LONG):
        page.set_viewport_size({"width": width, "height": 800})
        until(page, "document.querySelectorAll('#rows li:not(.idle)').length === 1")
        wide = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        assert page.evaluate(wide)
        drawn = "document.querySelector('#rows canvas')"
        until(page, f"{drawn}.width === Math.round({drawn}.getBoundingClientRect().width)")
