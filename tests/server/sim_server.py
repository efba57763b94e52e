"""`cbatch serve` without a model: it prints its port when it listens, and obeys signals."""

from __future__ import annotations

import sys
from functools import partial

import msgspec
import uvloop

from cbatch.process import client as client_module
from cbatch.process.client import EngineClient
from cbatch.process.server import EngineProcess
from cbatch.server.http.app import create_app
from cbatch.server.http.connections import ServerConfig
from cbatch.server.http.limits import ConnectionLimits
from cbatch.server.http.run import DrainingServer
from cbatch.server.serving.service import EngineService
from cbatch.system.logs import configure
from tests.process.factories import SimFactory
from tests.server.http_client import served_model
from tests.toy_engine import TOKENIZER


class Settings(msgspec.Struct, frozen=True):
    """Settings of the server. `max_deaths`: number of engine deaths without a token before it gives
    up."""

    factory: SimFactory
    grace_s: float
    max_deaths: int = client_module.MAX_DEATHS_WITHOUT_TOKEN
    connections: ConnectionLimits = ConnectionLimits()


async def serve(settings: Settings) -> None:
    client_module.MAX_DEATHS_WITHOUT_TOKEN = settings.max_deaths
    service = EngineService(EngineClient(partial(EngineProcess, settings.factory)), TOKENIZER)
    model = served_model(await service.start(), TOKENIZER)
    limits = settings.connections
    app = create_app(service, model, limits=limits)
    config = ServerConfig(app, limits, port=0, log_config=None)
    server = DrainingServer(
        config, service, grace_s=settings.grace_s, on_listening=lambda port: print(port, flush=True)
    )
    await server.serve()


if __name__ == "__main__":
    configure("text")
    uvloop.run(serve(msgspec.json.decode(sys.argv[1], type=Settings)))
