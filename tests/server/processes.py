"""Servers with engine processes, and clients to load them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cbatch.kv_events.publisher import KVEventPublisher
from cbatch.process.client import EngineClient
from cbatch.process.server import EngineProcess, Factory
from cbatch.server.serving.admission_queue import Limits
from cbatch.server.serving.service import EngineService
from cbatch.text import TextTokenizer
from tests.server.http_client import Client, serving_service
from tests.server.raw_calls import Answer as Answer
from tests.server.raw_calls import call as call
from tests.toy_engine import TOKENIZER

ROOT = Path(__file__).parent.parent.parent


class Served(NamedTuple):
    client: Client
    service: EngineService
    engine: EngineClient


@contextmanager
def serving_process(
    factory: Factory,
    limits: Limits | None = None,
    tokenizer: TextTokenizer = TOKENIZER,
    kv_events: KVEventPublisher | None = None,
) -> Iterator[Served]:
    """Serve HTTP in a thread, so that the test can inspect the server, with the engine in a
    process."""
    engine = EngineClient(partial(EngineProcess, factory))
    service = EngineService(engine, tokenizer, limits=limits, kv_events=kv_events)
    with serving_service(service, tokenizer) as client:
        yield Served(client, service, engine)
