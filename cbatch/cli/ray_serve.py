"""Replicas on Ray Serve: each is the server's application with an engine process of its own. Serve
starts and ends them, sends calls to them, and looks after their health and number.

`build` is for a Serve config file: `import_path: cbatch.cli.ray_serve:build`, its `args` are the
options of `cbatch serve` by the names of a TOML file.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
from collections.abc import Collection, Mapping
from typing import Any

from cbatch.cli.model_service import ModelParts
from cbatch.cli.serve_settings import ServeSettings
from cbatch.cli.settings import Settings, settings_of
from cbatch.core.request.errors import FieldError
from cbatch.process.connection import EngineStartError
from cbatch.server.http.app import create_app
from cbatch.server.http.middleware import RequestMiddleware
from cbatch.server.serving.fleet_metrics import merge
from cbatch.server.serving.metrics import Metrics
from cbatch.system.heap import freeze_heap, give_back_large_blocks
from cbatch.system.logs import configure

NAME = "cbatch"  # of the application and of its one deployment
FLUSH_S = 10  # to tell what is left when the grace time is over, and to end the engine
_LOOK_S = 0.5  # between two looks at whether Serve is ending this replica
_SCRAPE_S = 5  # for a replica to say what it has counted
_STARTS = 3  # of a replica that fails to, before the deployment is given up
_HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
_BALANCE = "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"
_CONNECTIONS = "clients connect to Ray Serve"
_SHARED = "replicas would all write to it"
_REFUSED = {  # by setting: why none of many replicas can have it, and what to do
    "record": (_SHARED, "leave it out, or record a server that is alone"),
    "kv_events_config": ("Ray Serve chooses the replica, no gateway", "leave it out"),
    "max_requests_per_key": ("every replica would count alone", "leave the limit to a gateway"),
    "max_connections": (_CONNECTIONS, "leave it out"),
    "request_timeout": (_CONNECTIONS, "leave it out"),
}
IN_A_FILE = {  # and where a Serve config file says it
    "ray": ("Ray Serve reads this file", "leave it out"),
    "host": (_CONNECTIONS, "say it under http_options"),
    "port": (_CONNECTIONS, "say it under http_options"),
    "session_header": (_CONNECTIONS, f"set {_BALANCE} to hdr(NAME) on every node"),
}
# Of Serve on one machine: HAProxy before the replicas, each with an HTTP server of its own, since
# Serve's other proxy passes every token through Python once more. Others may be set beside them.
ENVIRONMENT = {
    _HAPROXY: "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",  # for HAProxy to hear who ends
    # An old HAProxy ends with its last stream: one is left behind whenever replicas come or go.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "86400",
    # What nothing was answered to is asked again, of another replica.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_HAPROXY_NBTHREAD": "1",  # of four on few processors each wakes for a token or two
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",  # ten looks a second are 3 % of a processor
    "RAY_USAGE_STATS_ENABLED": "0",  # it would tell Ray's makers
}
_LOOPBACK = ("localhost", "127.", "::1")
_logger = logging.getLogger("cbatch")


def require_fit(settings: Settings[ServeSettings], more: Collection[str] = ()) -> None:
    """Raises `FieldError` for settings that replicas cannot obey."""
    refused = _REFUSED | {name: IN_A_FILE[name] for name in more}
    for name, (why, remedy) in refused.items():
        if name in settings.given:
            raise FieldError(settings.origin(name), f"is not for replicas: {why}", remedy)
    least, most = settings.values.min_replicas, settings.values.max_replicas
    if most is not None and most < least:
        problem = f"{most} are fewer than the least, {least}"
        raise FieldError(settings.origin("max_replicas"), problem, f"give {least} or more")


def build(args: Mapping[str, Any]) -> Any:
    """The application of a Serve config file. Raises `FieldError`."""
    settings = settings_of(ServeSettings, args, "args")
    require_fit(settings, IN_A_FILE)
    return application(settings.values)


class ServerReplica:
    """Runs in an actor of Ray."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        configure(settings.log_format)

    async def __serve_build_asgi_app__(self) -> RequestMiddleware:
        settings, serve = self._settings, require_ray("ray.serve")
        context = serve.get_replica_context()
        _is_ending()  # it fails here rather than at the end
        self._name = str(context.replica_tag)
        self._all = serve.get_deployment_handle(context.deployment, app_name=context.app_name)
        parts = ModelParts(settings)
        self._service = parts.make_service()
        served = await parts.start(self._service)
        self._metrics = Metrics(served.name, self._service)
        self._ending = asyncio.create_task(self._tell_at_the_end())
        freeze_heap()
        give_back_large_blocks()
        app = create_app(
            self._service,
            served,
            keys=parts.keys,
            open_metrics=settings.open_metrics,
            cors_origins=settings.cors_origin,
            metrics=self._metrics,
            metrics_page=self._page_of_all,
        )
        await self._service.warm()
        return app

    async def check_health(self) -> None:
        """Raises where nothing but another replica helps: an engine that died is started again by
        the replica itself, and its calls go on."""
        if not self._service.running:
            raise RuntimeError(self._service.down or "the engine does not run")

    async def metrics_page(self) -> tuple[str, bytes]:
        return self._name, self._metrics.page()

    async def drain(self) -> None:
        await self._service.drain(self._settings.grace)

    async def _page_of_all(self) -> bytes:
        answers = self._all.broadcast("metrics_page")
        pages = await answers.results_async(timeout_s=_SCRAPE_S, return_exceptions=True)
        return merge(sorted(page for page in pages if isinstance(page, tuple)))

    async def _tell_at_the_end(self) -> None:
        """Serve sends a replica that it ends no more calls, waits for those it has, and then kills
        it: they are told before that."""
        while not _is_ending():
            await asyncio.sleep(_LOOK_S)
        await asyncio.sleep(self._settings.grace)
        self._service.end_all(self._settings.grace)


def _is_ending() -> bool:
    """Serve calls nobody before it waits: only the actor's own object knows."""
    worker = require_ray("ray._private.worker").global_worker
    return bool(worker.actors[worker.actor_id]._replica_impl._shutting_down)


def application(settings: ServeSettings) -> Any:
    """Of Ray Serve, to be run. Raises `FieldError` where there is no Ray."""
    serve, engine = require_ray("ray.serve"), settings.engine
    least, most = settings.min_replicas, settings.max_replicas or settings.min_replicas
    number: dict[str, Any] = {"num_replicas": least}
    if most > least:
        bounds = {"min_replicas": least, "max_replicas": most}
        number = {"autoscaling_config": bounds | {"target_ongoing_requests": engine.max_slots}}
    deployment = serve.deployment(
        serve.ingress()(ServerReplica),
        name=NAME,
        **number,
        # The engine's own queue is the one that refuses; Serve's begins where that is full.
        max_ongoing_requests=engine.max_slots + settings.limits.max_queued_requests,
        max_queued_requests=settings.limits.max_queued_requests,
        graceful_shutdown_timeout_s=settings.grace + FLUSH_S,
        max_constructor_retry_count=_STARTS,
        logging_config={"enable_access_log": False},  # the server has its own
        ray_actor_options={
            "num_cpus": engine.tensor_parallel
            * (engine.threads if isinstance(engine.threads, int) else 1),
            "num_gpus": int(engine.device.startswith("cuda")),
        },
    )
    return deployment.bind(settings)


def run_replicas(settings: ServeSettings) -> None:
    """On a Ray of its own, until a signal has been obeyed; on a second one it stops at once. Raises
    `FieldError` or `EngineStartError`."""
    ray = require_ray("ray")
    ModelParts(settings)  # what is wrong is told before anything starts
    if "RAY_ADDRESS" in os.environ:
        remedy = "unset it, or give that Ray a config file: serve deploy deploy/ray_serve.yaml"
        raise FieldError("ray", "starts a Ray, and RAY_ADDRESS names one that runs", remedy)
    for name, value in ENVIRONMENT.items():  # Serve reads them as it is imported
        os.environ.setdefault(name, value)
    if settings.session_header is not None:
        if os.environ[_HAPROXY] != "1":
            raise FieldError("session_header", "is HAProxy's to read", f"leave {_HAPROXY} out")
        os.environ[_BALANCE] = f"hdr({settings.session_header})"
    serve = require_ray("ray.serve")
    ray.init("local", include_dashboard=False)
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.default_int_handler)
    try:
        require_reachable(settings.host, ray.util.get_node_ip_address())
        serve.start(http_options={"host": settings.host, "port": settings.port})
        try:
            handle = serve.run(application(settings), name=NAME)
        except RuntimeError as error:
            raise EngineStartError(str(error)) from error
        _logger.info(f"serving replicas on http://{settings.host}:{settings.port}/v1")
        try:
            signal.pause()
        except KeyboardInterrupt:
            answers = handle.broadcast("drain")
            answers.results(timeout_s=settings.grace + FLUSH_S, return_exceptions=True)
    finally:
        serve.shutdown()
        ray.shutdown()


def require_reachable(host: str, node: str) -> None:
    """Raises `FieldError` where HAProxy, which goes by the node's address, would find nobody."""
    by_haproxy = os.environ[_HAPROXY] == "1"
    if by_haproxy and host.startswith(_LOOPBACK) and not node.startswith(_LOOPBACK):
        problem = f"{host} is not where replicas are reached, which is {node}"
        raise FieldError("host", problem, f"give {node}, or 0.0.0.0 for all addresses")


def require_ray(module: str) -> Any:
    """Raises `FieldError` where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        remedy = "install it: pip install 'cbatch[ray]'"
        raise FieldError("ray", f"Ray Serve cannot be imported ({error})", remedy) from error
