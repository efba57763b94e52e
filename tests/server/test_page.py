"""The live page in a browser: it shows running requests, and its prompt box completes text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cbatch.server.http.keys import KeyRing
from tests.browser import MISSING, browsing, until
from tests.server.engines import PROMPT, ROOMY, SlowEngine
from tests.server.http_client import Client, serving, wait_until
from tests.toy_engine import make_engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]
LONG = {"prompt": PROMPT, "max_tokens": 6000, "stream": True, "seed": 3, "ignore_eos": True}

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


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        pytest.MonkeyPatch.context() as patch,
        serving(SlowEngine(patch, lookahead="fixed:3", **ROOMY).engine) as client,
    ):
        yield client


@contextmanager
def opened(tab: Tab, client: Client) -> Iterator[Any]:
    page, log = tab
    log.clear()
    page.set_viewport_size({"width": 1400, "height": 900})
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


def rows(page: Any, number: int) -> None:
    """Wait until this number of slots is in use."""
    until(page, f"document.querySelectorAll('#rows li:not(.idle)').length === {number}")


def submit(page: Any, max_tokens: int | str, prompt: str | None = None) -> None:
    """Use the prompt box, by keyboard alone."""
    page.evaluate("document.getElementById('prompt').focus()")
    page.evaluate("document.getElementById('prompt').select()")
    if prompt is not None:
        page.keyboard.insert_text(prompt)
    page.evaluate(f"document.getElementById('max-tokens').value = {max_tokens}")
    page.keyboard.press("Control+Enter")


def test_slots_show_tokens_accepted_and_rejected_at_any_width(tab: Tab, client: Client) -> None:
    with opened(tab, client) as page:
        until(page, "!document.getElementById('idle').hidden")
        assert page.evaluate("document.querySelectorAll('#rows li').length") == 0
        with client.open(LONG), client.open(LONG | {"seed": 4}):
            rows(page, 2)
            until(page, "document.querySelector('#rows .share b').textContent.endsWith('%')")
            until(page, "document.querySelector('#v-accepted').innerText.endsWith('%')")
            row = text_of(page, "rows").split()
            assert row[0] == "slot" and "k 3" in " ".join(row)
            assert "drafts accepted" in " ".join(row)
            assert PROMPT not in str(page.evaluate("document.getElementById('rows').outerHTML"))
            until(page, "document.getElementById('v-load').innerText.includes('2 of')")
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                for name in ("accepted", "rejected", "own"):
                    until(page, f"{INK % json.dumps('#rows canvas')}.{name} > 50")
                until(page, f"{INK % json.dumps('#c-pool')}.accepted > 20")
            for width in (360, 700, 1000, 1800):
                page.set_viewport_size({"width": width, "height": 800})
                wide = "document.documentElement.scrollWidth <= innerWidth"
                assert page.evaluate(wide), width
                drawn = "document.querySelector('#rows canvas')"
                until(page, f"{drawn}.width === Math.round({drawn}.getBoundingClientRect().width)")
        rows(page, 0)


def test_without_drafts_no_acceptance_is_shown(tab: Tab, client: Client) -> None:
    plain = LONG | {"max_lookahead": 0}
    with opened(tab, client) as page, client.open(plain):
        rows(page, 1)
        until(page, "document.querySelector('#v-k').innerText.startsWith('0.0')")
        assert text_of(page, "v-accepted") == "–"
        until(page, f"{INK % json.dumps('#rows canvas')}.own > 20")
        ink = page.evaluate(INK % json.dumps("#rows canvas"))
        assert ink["accepted"] == ink["rejected"] == 0
        assert page.evaluate("document.querySelector('#rows .share b').textContent") == "–"


def test_the_prompt_box_shows_the_completion_and_stops_it(tab: Tab, client: Client) -> None:
    """Text that looks like HTML stays text."""
    prompt = '<img src=x onerror="document.title = 1">'
    with opened(tab, client) as page:
        submit(page, 24, prompt)
        until(page, "document.getElementById('result').textContent.startsWith('24 tokens in')")
        answer = page.evaluate("document.getElementById('answer').textContent")
        assert answer.startswith(prompt) and len(answer) >= len(prompt) + 24
        assert page.evaluate("document.querySelectorAll('#answer img').length") == 0
        page.evaluate("document.getElementById('max-tokens').max = ''")
        submit(page, 99999999999)
        until(page, "document.getElementById('result').classList.contains('wrong')")
        assert "max_tokens" in text_of(page, "result")
        with client.open(LONG):  # its own completion is marked among the slots
            rows(page, 1)
            submit(page, 3000)
            until(page, "document.querySelectorAll('#rows li.mine').length === 1")
            slot = page.evaluate("document.querySelector('#rows .mine .slot').textContent")
            assert slot == "slot 1"
            page.keyboard.press("Escape")
            until(page, "document.getElementById('result').textContent === 'Stopped.'")
            rows(page, 1)
        tab[1].clear()  # the browser logs the answer of 400


def test_the_page_asks_for_a_key_and_its_policy_blocks_what_is_not_its_own(tab: Tab) -> None:
    inline = "document.body.append(Object.assign(document.createElement('script'), {text: 's'}))"
    outside = "fetch('http://127.0.0.1:1/').catch((error) => 'refused')"
    with serving(make_engine(), keys=KeyRing(["right"])) as client:
        with opened(tab, client) as page:
            for key, state in (("wrong", "needs a key"), ("right", "running")):
                until(page, "!document.getElementById('key').hidden")
                page.evaluate(f"document.getElementById('key-field').value = {key!r}")
                page.evaluate("document.getElementById('key').requestSubmit()")
                until(page, f"document.getElementById('state').textContent === {state!r}")
            until(page, "document.getElementById('key').hidden")
            page.evaluate("document.getElementById('prompt-form').requestSubmit()")
            until(page, "document.getElementById('result').textContent.includes('tokens in')")
            tab[1].clear()  # the browser logs each answer of 401
        for script in (inline, outside):
            with pytest.raises(AssertionError, match="policy"), opened(tab, client) as page:
                page.evaluate(script)
                wait_until(lambda: page.evaluate("1") == 1 and bool(tab[1]))
        tab[0].goto(f"http://127.0.0.1:{client.port}/")
        tab[0].evaluate("sessionStorage.clear()")
