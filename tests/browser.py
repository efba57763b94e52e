"""A headless Chromium, run by playwright, for the tests of the live page."""

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
# Reason why no browser can run on this machine, or None.
MISSING = "there is no `chromium` on this machine" if CHROMIUM is None else None
if importlib.util.find_spec("playwright") is None:
    MISSING = "there is no playwright: pip install -e '.[dev]'"


@contextmanager
def browsing() -> Iterator[tuple[Page, list[str]]]:
    """Start a browser without a profile. Yields a tab, and a list that collects console messages
    and script errors."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium's sandbox does not work for root; only our own page is loaded.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page, log = browser.new_page(), list[str]()
        page.on(
            "console",
            lambda message: log.append(f"{message.text} {message.location.get('url', '')}"),
        )
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
