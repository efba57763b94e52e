"""Settings of replicas on Ray Serve, and unsupported settings. No test needs Ray."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cbatch.cli import ray_serve
from cbatch.cli.ray_serve import build, require_reachable, run_replicas
from cbatch.cli.serve_settings import ServeSettings
from cbatch.core.request.errors import FieldError
from tests.cli.conftest import Run

Cbatch = Callable[..., Run]
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ray", "ray.serve"):
        monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.usefixtures("no_ray")
def test_without_ray_the_extra_is_named(cbatch: Cbatch) -> None:
    with pytest.raises(FieldError, match=r"ray: .*pip install 'cbatch\[ray\]'"):
        build({})
    run = cbatch("serve", "--ray")
    assert run.status == 2 and "--ray" in run.err and "cbatch[ray]" in run.err


@pytest.mark.parametrize(
    "flags",
    [
        ("--record", "FILE"),
        ("--kv-events-config", "{}"),
        ("--max-requests-per-key", "3"),
        ("--max-connections", "5"),
        ("--request-timeout", "30"),
    ],
)
def test_settings_that_replicas_do_not_support_are_rejected_by_name(
    cbatch: Cbatch, flags: tuple[str, str]
) -> None:
    run = cbatch("serve", "--ray", *flags)
    assert run.status == 2
    assert run.err.startswith(f"cbatch: {flags[0]}: is not available with replicas: ")


def test_a_serve_config_file_may_not_set_serves_own_options() -> None:
    for name, value in {"host": "0.0.0.0", "port": 1, "ray": True, "session_header": "x"}.items():
        with pytest.raises(FieldError, match=f"args: {name}: is not available with replicas"):
            build({name: value})
    with pytest.raises(FieldError, match="args: max_slot: is not known"):
        build({"max_slot": 4})
    with pytest.raises(FieldError, match="args: max_replicas: 1 is less than min_replicas, 2"):
        build({"min_replicas": 2, "max_replicas": 1})


@pytest.mark.parametrize("flag", ["--min-replicas", "--max-replicas", "--session-header"])
def test_a_single_server_rejects_settings_for_replicas(cbatch: Cbatch, flag: str) -> None:
    run = cbatch("serve", flag, "2")
    assert run.status == 2 and f"{flag}: is for replicas only" in run.err and "--ray" in run.err


def test_a_running_ray_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(FieldError, match="RAY_ADDRESS"):
        run_replicas(ServeSettings())


def test_haproxy_does_not_find_replicas_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    with pytest.raises(FieldError, match=r"host: .*10\.0\.0\.7"):
        require_reachable("127.0.0.1", "10.0.0.7")
    require_reachable("0.0.0.0", "10.0.0.7")
    require_reachable("127.0.0.1", "127.0.0.1")
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    require_reachable("127.0.0.1", "10.0.0.7")


def test_numbers_of_replicas_and_calls_are_passed_to_serve() -> None:
    pytest.importorskip("ray", reason="needs Ray Serve: pip install 'cbatch[ray]'")

    def config(**args: Any) -> Any:
        return build(args)._bound_deployment._deployment_config

    one = config(max_num_seqs=4, grace=7)
    assert (one.num_replicas, one.autoscaling_config) == (1, None)
    assert one.max_ongoing_requests == 4 + ServeSettings().limits.max_queued_requests
    assert one.graceful_shutdown_timeout_s == 7 + ray_serve.FLUSH_S
    scaled = config(max_num_seqs=4, min_replicas=2, max_replicas=5).autoscaling_config
    assert (scaled.min_replicas, scaled.max_replicas) == (2, 5)
    assert scaled.target_ongoing_requests == 4


def test_every_variable_that_is_set_is_listed() -> None:
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8").replace('"', "")
    for name, value in ray_serve.ENVIRONMENT.items():
        assert f"`{name}={value}`" in text, name
