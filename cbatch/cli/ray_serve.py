"""Replicas on Ray Serve (`cbatch serve --ray`). A replica is the ASGI application of `cbatch serve`
with an engine process of its own. Serve starts, stops, routes, health-checks and scales replicas.

`build` is the `import_path` of a Serve config file (`cbatch.cli.ray_serve:build`). The `args` there
are options of `cbatch serve`, under the names that they have in a TOML file.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cbatch.cli.model_service import ModelParts
from cbatch.cli.serve_settings import ServeSettings
from cbatch.cli.settings import Settings, settings_of
from cbatch.core.request.errors import FieldError
from cbatch.process.connection import EngineStartError
from cbatch.server.http.app import create_app
from cbatch.server.http.middleware import RequestMiddleware
from cbatch.server.serving.metrics import Metrics, merge
from cbatch.system.heap import freeze_heap, lower_mmap_threshold
from cbatch.system.logs import configure

NAME = "cbatch"  # name of the Serve application and of its only deployment
FLUSH_S = 10  # time after the grace time to send the last errors and stop the engine
_POLL_S = 0.5  # interval at which a replica checks whether Serve is shutting it down
_SCRAPE_S = 5  # timeout for the metrics of the other replicas
_MAX_FAILED_STARTS = 3  # of a replica, after which Serve gives the deployment up
_HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
_BALANCE = "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"
_CONNECTIONS = "clients connect to Ray Serve"
_SHARED = "replicas would all write to it"
_REFUSED = {  # setting: why replicas do not support it, and the remedy
    "record": (_SHARED, "leave it out, or record a single server"),
    "kv_events_config": ("Ray Serve, not a gateway, chooses the replica", "leave it out"),
    "max_requests_per_key": (
        "each replica would count only its own calls",
        "set the limit in a gateway",
    ),
    "max_connections": (_CONNECTIONS, "leave it out"),
    "request_timeout": (_CONNECTIONS, "leave it out"),
    "keep_alive": (_CONNECTIONS, "leave it out"),
}
REFUSED_IN_FILE = {  # settings that are refused in the `args` of a Serve config file too
    "ray": ("Ray Serve reads this file", "leave it out"),
    "host": (_CONNECTIONS, "set it under http_options"),
    "port": (_CONNECTIONS, "set it under http_options"),
    "session_header": (_CONNECTIONS, f"set {_BALANCE} to hdr(NAME) on every node"),
}
# Defaults of Ray's environment variables for `run_replicas`. HAProxy routes to an HTTP server in
# each replica; Serve's own proxy would pass every token through Python once more.
ENVIRONMENT = {
    _HAPROXY: "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",  # HAProxy notices draining late
    # A change of replicas starts a new HAProxy; the old process may finish its streams for a day.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "86400",
    # A request is sent to another replica if the first replica answered nothing.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_HAPROXY_NBTHREAD": "1",  # each of Ray's default 4 would wake up for a token or two
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",  # Ray's default of 0.1 takes 3 % of a processor
    "RAY_USAGE_STATS_ENABLED": "0",  # no telemetry to Ray's makers
}
_LOOPBACK = ("localhost", "127.", "::1")
_logger = logging.getLogger("cbatch")


def require_fit(settings: Settings[ServeSettings], more: Collection[str] = ()) -> None:
    """Check that replicas support the `settings`. `more` names the settings in `REFUSED_IN_FILE`
    to refuse as well. Raises `FieldError`."""
    refused = _REFUSED | {name: REFUSED_IN_FILE[name] for name in more}
    for name, (why, remedy) in refused.items():
        if name in settings.given:
            raise FieldError(
                settings.origin(name), f"is not available with replicas: {why}", remedy
            )
    smallest, largest = settings.values.min_replicas, settings.values.max_replicas
    if largest is not None and largest < smallest:
        problem = f"{largest} is less than min_replicas, {smallest}"
        raise FieldError(settings.origin("max_replicas"), problem, f"give {smallest} or more")


def build(args: Mapping[str, Any]) -> Any:
    """Return the Serve application for the `args` of a Serve config file. Raises `FieldError`."""
    settings = settings_of(ServeSettings, args, "args")
    require_fit(settings, REFUSED_IN_FILE)
    return application(settings.values)


class ServerReplica:
    """The deployment's class: one server with its engine, inside a Ray actor."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        configure(settings.log_format)

    async def __serve_build_asgi_app__(self) -> RequestMiddleware:
        from ray import serve

        settings = self._settings
        context = serve.get_replica_context()
        _is_ending()  # fails now, not at shutdown, if this Ray lacks the private attribute
        self._name = str(context.replica_tag)
        self._replicas = serve.get_deployment_handle(context.deployment, app_name=context.app_name)
        parts = ModelParts(settings)
        self._service = parts.make_service()
        served = await parts.start(self._service)
        self._metrics = Metrics(served.name, self._service)
        self._shutdown = asyncio.create_task(self._end_requests_at_shutdown())
        freeze_heap()
        lower_mmap_threshold()
        app = create_app(
            self._service,
            served,
            keys=parts.keys,
            open_metrics=settings.open_metrics,
            cors_origins=settings.cors_origin,
            metrics=self._metrics,
            metrics_page=self._merged_metrics_page,
            span_exporter=parts.span_exporter,
        )
        await self._service.warm()
        return app

    async def check_health(self) -> None:
        """Raise `RuntimeError`, so that Serve replaces the replica, if the engine is gone for good.
        The replica itself restarts an engine that died, and its requests continue."""
        if not self._service.running:
            raise RuntimeError(self._service.client.down or "the engine does not run")

    async def metrics_page(self) -> tuple[str, bytes]:
        return self._name, self._metrics.page()

    async def drain(self) -> None:
        await self._service.drain(self._settings.grace)

    async def _merged_metrics_page(self) -> bytes:
        """Return the metrics of all replicas that answer in time, as Prometheus text."""
        responses = self._replicas.broadcast("metrics_page")
        pages = await responses.results_async(timeout_s=_SCRAPE_S, return_exceptions=True)
        return merge(sorted(page for page in pages if isinstance(page, tuple)))

    async def _end_requests_at_shutdown(self) -> None:
        """End the remaining requests with an error once shutdown has taken the grace time. Serve
        would kill the replica a little later, and the clients would get no error."""
        while not _is_ending():
            await asyncio.sleep(_POLL_S)
        await asyncio.sleep(self._settings.grace)
        self._service.end_all(self._settings.grace)


def _is_ending() -> bool:
    """Return whether Serve is shutting this replica down. Serve has no callback for it: the flag is
    a private attribute of the actor."""
    from ray._private.worker import global_worker as worker

    return bool(worker.actors[worker.actor_id]._replica_impl._shutting_down)


def application(settings: ServeSettings) -> Any:
    with _refusing_without_ray():
        from ray import serve
    engine = settings.engine
    smallest, largest = settings.min_replicas, settings.max_replicas or settings.min_replicas
    scale: dict[str, Any] = {"num_replicas": smallest}
    if largest > smallest:
        bounds = {"min_replicas": smallest, "max_replicas": largest}
        scale = {"autoscaling_config": bounds | {"target_ongoing_requests": engine.max_num_seqs}}
    deployment = serve.deployment(
        serve.ingress()(ServerReplica),
        name=NAME,
        **scale,
        # A replica may take a full batch and a full queue; further requests wait in Serve's queue.
        max_ongoing_requests=engine.max_num_seqs + settings.limits.max_queued_requests,
        max_queued_requests=settings.limits.max_queued_requests,
        graceful_shutdown_timeout_s=settings.grace + FLUSH_S,
        max_constructor_retry_count=_MAX_FAILED_STARTS,
        logging_config={"enable_access_log": False},  # the server's middleware logs requests
        ray_actor_options={
            "num_cpus": engine.tensor_parallel_size
            * (engine.threads if isinstance(engine.threads, int) else 1),
            "num_gpus": int(engine.device.startswith("cuda")),
        },
    )
    return deployment.bind(settings)


def run_replicas(settings: ServeSettings) -> None:
    """Start a local Ray and serve replicas until SIGTERM or SIGINT, then drain them. A second
    signal stops at once. Raises `FieldError` or `EngineStartError`."""
    with _refusing_without_ray():
        import ray
    ModelParts(settings)  # check the settings before anything starts
    if "RAY_ADDRESS" in os.environ:
        remedy = "unset it, or give that Ray a config file: serve deploy deploy/ray_serve.yaml"
        raise FieldError("ray", "starts a Ray, and RAY_ADDRESS names one that runs", remedy)
    for name, value in ENVIRONMENT.items():  # before the import: Serve reads them there
        os.environ.setdefault(name, value)
    if settings.session_header is not None:
        if os.environ[_HAPROXY] != "1":
            raise FieldError("session_header", "is read by HAProxy", f"leave {_HAPROXY} out")
        os.environ[_BALANCE] = f"hdr({settings.session_header})"
    with _refusing_without_ray():
        from ray import serve
    ray.init("local", include_dashboard=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
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
            responses = handle.broadcast("drain")
            responses.results(timeout_s=settings.grace + FLUSH_S, return_exceptions=True)
    finally:
        serve.shutdown()
        ray.shutdown()


def require_reachable(host: str, node: str) -> None:
    """Check that replicas that listen on `host` can be reached at `node`, the Ray node's
    address, which HAProxy uses. Raises `FieldError`."""
    by_haproxy = os.environ[_HAPROXY] == "1"
    if by_haproxy and host.startswith(_LOOPBACK) and not node.startswith(_LOOPBACK):
        problem = f"{host} is not the address of the replicas, {node}"
        raise FieldError("host", problem, f"give {node}, or 0.0.0.0 for all addresses")


@contextmanager
def _refusing_without_ray() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        remedy = "install it: pip install 'cbatch[ray]'"
        raise FieldError("ray", f"Ray Serve cannot be imported ({error})", remedy) from error
