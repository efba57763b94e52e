"""The demo pair in a real server, and the same pair without a server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from cbatch import LLM
from cbatch.demo import demo_paths
from cbatch.text import ChatTemplate, load_chat_template
from tests.server.http_client import Client, serving
from tests.server.scripted import Scripted, scripted_server
from tests.toy_engine import make_engine

ROLES = ChatTemplate(
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}", {}, "the test"
)
OPTIONS: dict[str, Any] = {"numerics": "invariant", "lookahead": "ema:4", "max_num_seqs": 32}


@pytest.fixture(scope="session")
def demo_llm() -> LLM:
    return LLM(*demo_paths(), **OPTIONS)


@pytest.fixture(scope="session")
def demo_client() -> Iterator[Client]:
    engine = LLM(*demo_paths(), **OPTIONS).engine
    with serving(engine, chat_template=load_chat_template(demo_paths()[0])) as client:
        yield client


@pytest.fixture(scope="session")
def toy_client() -> Iterator[Client]:
    """Serve a toy engine whose prompts are `[role]content` of each message."""
    with serving(make_engine(), chat_template=ROLES) as client:
        yield client


@pytest.fixture(scope="session")
def wide_client() -> Iterator[Client]:
    """The same with a context of 256 tokens."""
    with serving(make_engine(max_model_len=256), chat_template=ROLES) as client:
        yield client


@pytest.fixture(scope="session")
def _scripted() -> Iterator[Scripted]:
    with scripted_server() as scripted:
        yield scripted


@pytest.fixture
def scripted(_scripted: Scripted) -> Iterator[Scripted]:
    yield _scripted
    _scripted.restore()


@pytest.fixture
def otel_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove OpenTelemetry's variables, and let its thread export at once."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
