"""Servers with slow engines, so that calls overlap as a test wants, and with engine processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.engine.engine import Engine
from cbatch.kv_events.publisher import KVEventPublisher
from cbatch.process.client import EngineClient
from cbatch.process.server import EngineProcess, Factory
from cbatch.server.serving.admission_queue import Limits
from cbatch.server.serving.service import EngineService
from cbatch.text import ChatTemplate, TextTokenizer
from tests.checking.executor import SimExecutor
from tests.process.factories import SimFactory
from tests.process.threads import EngineThread
from tests.server.http_client import Client, serving_service
from tests.toy_engine import TOKENIZER, make_engine

PROMPT = "def add(a, b):"
ROOMY = {"num_blocks": 4096, "max_model_len": 8192, "block_size": 4}
FIRST_CONTENT = ChatTemplate("{{ messages[0].content }}", {}, "the test")


class SlowEngine:
    """An engine with slow steps, so that a client can leave in the middle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **overrides: Any) -> None:
        run = SimExecutor.run

        def slow(executor: SimExecutor, plan: StepPlan) -> StepResult:
            time.sleep(0.003)
            return run(executor, plan)

        monkeypatch.setattr(SimExecutor, "run", slow)
        self.engine: Engine = make_engine(**(ROOMY | overrides))


class OneSlot(NamedTuple):
    client: Client
    service: EngineService
    scheduler: Scheduler


@contextmanager
def one_slot(limits: Limits, **options: Any) -> Iterator[OneSlot]:
    """Serve an engine that runs one sequence at a time, with options of `serving_service`."""
    sizes = {"max_num_seqs": 1, "num_blocks": 512}
    # Steps are so long that a call has the slot until it leaves, on a busy machine too.
    core = SimFactory(vocab_size=TOKENIZER.vocab_size, step_s=0.02, sizes=sizes)()
    core.grammars = None
    service = EngineService(EngineClient(partial(EngineThread, core)), TOKENIZER, limits=limits)
    with serving_service(service, TOKENIZER, chat_template=FIRST_CONTENT, **options) as client:
        yield OneSlot(client, service, core.scheduler)


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
