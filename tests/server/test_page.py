"""The live page in a browser: what it shows is what runs, and its prompt box answers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.browser import CHROMIUM, Page, browsing
from cbatch.server.http.keys import KeyRing
from tests.process.factories import SimFactory
from tests.server.http_client import Client, serving, wait_until
from tests.server.processes import serving_process
from tests.server.test_app import PROMPT, ROOMY, SlowEngine
from tests.toy_engine import TOKENIZER, make_engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no `chromium` on this machine"),
]
LONG = {"prompt": PROMPT, "max_tokens": 3000, "stream": True, "seed": 3, "ignore_eos": True}
CONTROL = 2

# How many pixels of a canvas have each of the page's colours.
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


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browsing() as page:
        yield page


@contextmanager
def opened(page: Page, client: Client, *, dark: bool = False) -> Iterator[None]:
    page.log.clear()
    page.look(1400, 900, dark=dark)
    page.open(f"http://127.0.0.1:{client.port}/")
    page.until("document.getElementById('state').textContent !== 'connecting'")
    try:
        yield
        # A stream of the page before may be noted late as cut off.
        complaints = [
            line for line in page.log if "/live" not in line or f":{client.port}/" in line
        ]
        assert complaints == [], "of the console, or of the content policy"
    finally:
        page.open("about:blank")


def text_of(page: Page, name: str) -> str:
    return str(page.value(f"document.getElementById({name!r}).innerText"))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_slots_show_tokens_accepted_and_rejected(
    page: Page, monkeypatch: pytest.MonkeyPatch, dark: bool
) -> None:
    slow = SlowEngine(monkeypatch, lookahead="fixed:3", **ROOMY)
    with serving(slow.engine) as client, opened(page, client, dark=dark):
        page.until("!document.getElementById('nobody').hidden")
        assert page.value("document.querySelectorAll('#rows li').length") == 0
        with client.open(LONG), client.open(LONG | {"seed": 4}):
            page.until("document.querySelectorAll('#rows li:not(.idle)').length === 2")
            page.until("document.querySelector('#rows .share b').textContent.endsWith('%')")
            page.until("document.querySelector('#v-accepted').innerText.endsWith('%')")
            row = text_of(page, "rows").split()
            assert (
                row[0] == "slot" and "k 3" in " ".join(row) and "drafts accepted" in " ".join(row)
            )
            for name in ("accepted", "rejected", "own"):
                page.until(f"{INK % json.dumps('#rows canvas')}.{name} > 50")
            # The first summary was that of an idle engine: these change with the next one.
            page.until(f"{INK % json.dumps('#c-pool')}.accepted > 20")
            page.until("document.getElementById('v-load').innerText.includes('2 of')")
            assert PROMPT not in str(page.value("document.getElementById('rows').outerHTML"))
        page.until("document.querySelectorAll('#rows li:not(.idle)').length === 0")


def test_without_drafts_nothing_is_claimed(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowEngine(monkeypatch, lookahead="off", **ROOMY)
    with serving(slow.engine) as client, opened(page, client), client.open(LONG):
        page.until("document.querySelectorAll('#rows li:not(.idle)').length === 1")
        page.until("document.querySelector('#v-k').innerText.startsWith('0.0')")
        assert text_of(page, "v-accepted") == "–"
        ink = page.value(INK % json.dumps("#rows canvas"))
        assert ink["own"] > 20 and ink["accepted"] == ink["rejected"] == 0
        assert page.value("document.querySelector('#rows .share b').textContent") == "–"
        assert page.value("document.getElementById('policy').hidden")


def test_the_prompt_box_answers(page: Page, demo_client: Client) -> None:
    """By keyboard alone; what is no text in HTML stays text."""
    client = demo_client
    prompt = '<img src=x onerror="document.title = 1">'
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0}
    with opened(page, client):
        page.value("document.getElementById('prompt').focus()")
        page.value("document.getElementById('prompt').select()")
        page.type(prompt)
        page.value("document.getElementById('max-tokens').value = 24")
        page.press("Enter", 13, modifiers=CONTROL)
        page.until("document.getElementById('told').textContent.startsWith('24 tokens in')")
        expected = prompt + client.post(body)[1]["choices"][0]["text"]
        assert page.value("document.getElementById('answer').textContent") == expected
        assert page.value("document.querySelectorAll('#answer img').length") == 0
        page.value("document.getElementById('max-tokens').max = ''")
        page.value("document.getElementById('max-tokens').value = 99999999999")
        page.press("Enter", 13, modifiers=CONTROL)
        page.until("document.getElementById('told').classList.contains('wrong')")
        assert "max_tokens" in text_of(page, "told")
        page.log.clear()  # the browser notes that it was answered with 400


def test_a_completion_is_found_among_the_slots_and_can_be_stopped(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowEngine(monkeypatch, **ROOMY)
    with serving(slow.engine) as client, opened(page, client), client.open(LONG):
        page.until("document.querySelectorAll('#rows li:not(.idle)').length === 1")
        page.value("document.getElementById('max-tokens').value = 3000")
        page.value("document.getElementById('prompt-form').requestSubmit()")
        page.until("document.querySelectorAll('#rows li.mine').length === 1")
        assert page.value("document.querySelector('#rows .mine .slot').textContent") == "slot 1"
        page.press("Escape", 27)
        page.until("document.getElementById('told').textContent === 'Stopped.'")
        page.until("document.querySelectorAll('#rows li:not(.idle)').length === 1")
        assert slow.engine.scheduler.num_running == 1


def test_it_asks_for_a_key(page: Page) -> None:
    with serving(make_engine(), keys=KeyRing(["right"])) as client, opened(page, client):
        for key, state in (("wrong", "needs a key"), ("right", "running")):
            page.until("!document.getElementById('key').hidden")
            page.value(f"document.getElementById('key-field').value = {key!r}")
            page.value("document.getElementById('key').requestSubmit()")
            page.until(f"document.getElementById('state').textContent === {state!r}")
        page.until("document.getElementById('key').hidden")
        page.value("document.getElementById('prompt-form').requestSubmit()")
        page.until("document.getElementById('told').textContent.includes('tokens in')")
        page.value("sessionStorage.clear()")
        page.log.clear()  # the browser notes each answer of 401


def test_it_goes_on_when_the_engine_is_killed(page: Page) -> None:
    factory = SimFactory(vocab_size=TOKENIZER.vocab_size, step_s=0.005)
    with (
        serving_process(factory) as served,
        opened(page, served.client),
        served.client.open(LONG | {"max_tokens": 480}),
    ):
        page.until("document.querySelectorAll('#rows li:not(.idle)').length === 1")
        assert served.engine.pid is not None
        os.kill(served.engine.pid, signal.SIGKILL)
        page.until("document.getElementById('state').textContent === 'running, 1 restart'")
        page.until("document.querySelectorAll('#rows li:not(.idle)').length === 1")


def test_the_policy_holds_and_its_refusals_are_heard(page: Page) -> None:
    with serving(make_engine()) as client:
        with opened(page, client):
            pass
        inline = (
            "document.body.append(Object.assign(document.createElement('script'), {text: 's'}))"
        )
        outside = "fetch('http://127.0.0.1:1/').catch((error) => 'refused')"
        for script in (inline, outside):
            with pytest.raises(AssertionError, match="policy"), opened(page, client):
                page.value(script)
                wait_until(lambda: page.value("1") == 1 and bool(page.log))


@pytest.mark.parametrize("width", [360, 700, 1000, 1800])
def test_nothing_sticks_out_at_any_width(
    page: Page, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    slow = SlowEngine(monkeypatch, lookahead="fixed:3", **ROOMY)
    with serving(slow.engine) as client, opened(page, client), client.open(LONG):
        page.look(width, 800)
        page.until("document.querySelectorAll('#rows li:not(.idle)').length === 1")
        wide = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        assert page.value(wide)
        drawn = "document.querySelector('#rows canvas')"
        page.until(f"{drawn}.width === Math.round({drawn}.getBoundingClientRect().width)")
