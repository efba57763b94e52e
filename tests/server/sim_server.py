"""`cbatch serve` without a model: prints its port when it listens, and obeys signals."""

from __future__ import annotations

import asyncio
import sys
from functools import partial

import msgspec
import uvicorn

from cbatch.engine import client as client_module
from cbatch.engine.client import EngineClient
from cbatch.engine.process import EngineProcess
from cbatch.server.app import create_app
from cbatch.server.run import DrainingServer
from cbatch.server.service import EngineService
from tests.engine.factories import SimFactory
from tests.server.http_client import served_model
from tests.toy_engine import TOKENIZER


class Settings(msgspec.Struct, frozen=True):
    """`max_deaths`: of an engine without a token, before it is given up."""

    factory: SimFactory
    grace_s: float
    max_deaths: int = client_module.MAX_BARREN_DEATHS


async def serve(settings: Settings) -> None:
    client_module.MAX_BARREN_DEATHS = settings.max_deaths
    service = EngineService(EngineClient(partial(EngineProcess, settings.factory)), TOKENIZER)
    model = served_model(await service.start(), TOKENIZER)
    config = uvicorn.Config(create_app(service, model), port=0, log_level="warning")
    server = DrainingServer(
        config,
        service,
        grace_s=settings.grace_s,
        on_listening=lambda port: print(port, flush=True),
    )
    await server.serve()


if __name__ == "__main__":
    asyncio.run(serve(msgspec.json.decode(sys.argv[1], type=Settings)))
