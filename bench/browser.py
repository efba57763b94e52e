"""A headless Chromium, by playwright: for the tests of the live page, and for its picture."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# Why there is no browser here; None: there is one.
MISSING = "there is no `chromium` on this machine" if CHROMIUM is None else None
if importlib.util.find_spec("playwright") is None:
    MISSING = "there is no playwright: pip install -e '.[dev]'"


@contextmanager
def browsing(scale: float = 1.0) -> Iterator[tuple[Page, list[str]]]:
    """Start a browser without a profile; yields a tab, and what its console says and its scripts
    throw. `scale` is the pixels of the screen to one of CSS."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium has no sandbox for root, and loads nothing but our page.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page, log = browser.new_page(device_scale_factor=scale), list[str]()
        page.on("console", lambda said: log.append(f"{said.text} {said.location.get('url', '')}"))
        page.on("pageerror", lambda error: log.append(str(error)))
        yield page, log
        browser.close()


def until(page: Page, expression: str, limit_s: float = 30.0) -> None:
    """Wait until a JavaScript expression is true. `Page.wait_for_function` would have the page
    evaluate it, which the page's content policy forbids. Raises AssertionError."""
    deadline_s = time.monotonic() + limit_s
    while not page.evaluate(expression):
        assert time.monotonic() < deadline_s, f"never: {expression}"
        page.wait_for_timeout(20)
