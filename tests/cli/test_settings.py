"""Sources of settings, their order, and errors about invalid settings."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cbatch.cli.main import make_parser
from cbatch.cli.serve import ServeSettings
from cbatch.cli.settings import Settings, read_settings, unknown_variables
from cbatch.core.request.errors import FieldError
from cbatch.engine.options import EngineOptions
from cbatch.server.serving.admission_queue import Limits
from tests.cli.conftest import Run

FILE = (
    'max_num_seqs = 5\nport = 7\ndrafter = ["ngram"]\nno_prefix_cache = true\nqueue_timeout = 2\n'
)


def arguments(*flags: str) -> argparse.Namespace:
    return make_parser().parse_args(["serve", *flags])


def read(
    tmp_path: Path, text: str = "", variables: dict[str, str] | None = None, *flags: str
) -> Settings[ServeSettings]:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    return read_settings(ServeSettings, arguments(*flags), variables, file)


def test_flags_override_variables_and_variables_override_the_file(tmp_path: Path) -> None:
    variables = {"CBATCH_PORT": "8", "CBATCH_DRAFTER": "suffix, ngram", "CBATCH_OVERLAP": "1"}
    settings = read(tmp_path, FILE, variables, "--drafter", "suffix", "DIR", "--ageing", "0.5")
    values = settings.values
    engine = values.engine
    assert (engine.max_num_seqs, values.port, engine.drafter) == (5, 8, ("suffix",))
    assert (
        not engine.enable_prefix_caching
        and engine.overlap == 1
        and values.limits.queue_timeout_s == 2.0
    )
    assert (values.model, engine.ageing_per_s, values.host) == ("DIR", 0.5, "127.0.0.1")
    origins = [settings.origin(name) for name in ("drafter", "port", "max_num_seqs", "host")]
    assert origins == [
        "--drafter",
        "CBATCH_PORT",
        f"{tmp_path / 'serve.toml'}: max_num_seqs",
        "--host",
    ]
    assert read(tmp_path, "", variables).values.engine.drafter == ("suffix", "ngram")


def test_only_the_server_has_the_setting_generation_config(
    cbatch: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other commands have sampling flags, so the model's defaults do not apply."""
    given: list[EngineOptions] = []

    def load(model: Any, draft: Any, options: EngineOptions) -> Any:
        given.append(options)
        raise FieldError("tensor_parallel_size", "is refused here", "leave it out")

    monkeypatch.setattr("cbatch.cli.generate.load_engine", load)
    refused = cbatch("generate", "prompt", "--tp", 2)
    assert refused.err == "cbatch: --tp: is refused here; leave it out\n"
    assert given == [EngineOptions(generation_config="none", tensor_parallel_size=2)]
    flags = ("--generation-config", "none")
    for text, variables, given, setting in (
        ("", {}, (), "auto"),
        ("", {}, flags, "none"),
        ('generation_config = "none"', {}, (), "none"),
        ('generation_config = "none"', {"CBATCH_GENERATION_CONFIG": "auto"}, (), "auto"),
    ):
        assert read(tmp_path, text, variables, *given).values.generation_config == setting
    with pytest.raises(SystemExit):
        read(tmp_path, "", {}, "--generation-config", "vllm")
    variables = {"CBATCH_GENERATION_CONFIG": "vllm"}
    with pytest.raises(FieldError, match="CBATCH_GENERATION_CONFIG: 'vllm' is not allowed"):
        read(tmp_path, "", variables)


def test_nested_settings_have_defaults_and_can_be_set() -> None:
    values = ServeSettings()
    assert read_settings(ServeSettings, arguments()).values == values
    assert (values.engine, values.limits) == (EngineOptions(), Limits())
    changed = arguments(
        "--max-num-seqs", "3", "--kv-cache-memory-bytes", "0.5G", "--no-enable-prefix-caching"
    )
    options = read_settings(ServeSettings, changed).values.engine
    assert (options.max_num_seqs, options.kv_cache_memory_bytes, options.enable_prefix_caching) == (
        3,
        2**29,
        False,
    )


@pytest.mark.parametrize(
    ("text", "variables", "flags", "origin", "problem"),
    [
        ("max_slot = 5", {}, (), "serve.toml: max_slot", "is not known"),
        ("max_num_seqs = '5'", {}, (), "serve.toml: max_num_seqs", "Expected `int`"),
        ("max_num_seqs = ", {}, (), "serve.toml", "cannot be read"),
        ("[engine]\nmax_slots = 1", {}, (), "serve.toml: engine", "is not known"),
        ("", {"CBATCH_PORT": "http"}, (), "CBATCH_PORT", "'http' is not allowed"),
        ("", {"CBATCH_PORT": "99999"}, (), "CBATCH_PORT", "99999"),
        ("", {"CBATCH_NUMERICS": "exact"}, (), "CBATCH_NUMERICS", "'exact' is not allowed"),
        ("", {"CBATCH_NO_PREFIX_CACHE": "maybe"}, (), "CBATCH_NO_PREFIX_CACHE", "maybe"),
        ("", {}, ("--max-num-seqs", "many"), "--max-num-seqs", "'many' is not allowed"),
        ("", {}, ("--grace", "-1"), "--grace", "-1"),
    ],
)
def test_errors_about_settings_name_their_source(
    tmp_path: Path,
    text: str,
    variables: dict[str, str],
    flags: tuple[str, ...],
    origin: str,
    problem: str,
) -> None:
    with pytest.raises(FieldError) as caught:
        read(tmp_path, text, variables, *flags)
    assert caught.value.field.endswith(origin) and problem in str(caught.value)


def test_errors_of_the_engine_use_the_name_that_the_user_gave(tmp_path: Path) -> None:
    for text, variables, flags, origin in (
        ("kv_memory = 1e-9", {}, (), "serve.toml: kv_memory"),
        ("", {"CBATCH_KV_MEMORY": "1e-9"}, (), "CBATCH_KV_MEMORY"),
        ("", {}, ("--kv-memory", "1e-9"), "--kv-memory"),
    ):
        settings = read(tmp_path, text, variables, *flags)
        error = FieldError("kv_cache_memory_bytes", "does not hold one block", "give more")
        assert settings.named(error).field.endswith(origin)
    stranger = FieldError("chat_template", "x", "y")
    assert settings.named(stranger).field == "--chat-template"
    assert settings.named(FieldError("config.json", "x", "y")).field == "config.json"
    assert settings.named(FieldError("lookahead.k", "x", "y")).field == "--lookahead"


def test_unknown_variables_are_reported_except_those_of_kubernetes(tmp_path: Path) -> None:
    cluster = {"CBATCH_SERVICE_HOST": "10.0.0.1", "CBATCH_PORT_80_TCP_ADDR": "10.0.0.1"}
    cluster["CBATCH_PORT"] = "tcp://10.0.0.1:80"
    variables = cluster | {"CBATCH_MAX_SLOT": "3", "CBATCH_CONFIG": "x", "CBATCH_KERNELS": "avx2"}
    assert unknown_variables(variables, ServeSettings) == ["CBATCH_MAX_SLOT"]
    assert read(tmp_path, "", cluster).values.port == 8000


def test_errors_at_start_name_the_remedy(
    cbatch: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No case starts an engine."""
    started: list[Any] = []
    monkeypatch.setattr("cbatch.process.server.EngineProcess.__init__", started.append)
    (tmp_path / "notes").write_text("mine")
    on = '"enable_kv_cache_events": true'
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for flags, message in (
            (("--port", port), f"--port: {port} is taken; stop the program that listens there"),
            (("--host", "203.0.113.7"), "--host: '203.0.113.7' cannot be bound"),
            ((str(tmp_path),), "MODEL: "),
            (("--record", tmp_path / "notes"), "notes cannot be written"),
            (("--record", tmp_path / "no" / "log"), "log cannot be written"),
            (("--max-requests-per-key", "2"), "--max-requests-per-key: there are no keys"),
            (("--api-key-file", tmp_path / "none"), "--api-key-file: "),
            (("--config", tmp_path / "none"), "none: cannot be read"),
            (("--chat-template", tmp_path / "none"), "none cannot be read"),
            ((tmp_path / "nothing",), str(tmp_path / "nothing")),
            (("--grace", "1", "--timeout", "-1"), "--timeout: -1.0 is not allowed"),
            (("--max-connections", 2**40), f"--max-connections: {2**40} need"),
            (
                ("--kv-events-config", f'{{{on}, "hmw": 1}}'),
                "--kv-events-config: Object contains unknown field `hmw`; use enable_kv_cache",
            ),
            (
                ("--kv-events-config", f'{{{on}, "endpoint": "ipc://{tmp_path}/no/file"}}'),
                "no/file' cannot be bound",
            ),
            (
                ("--no-enable-prefix-caching", "--kv-events-config", f"{{{on}}}"),
                "--kv-events-config: has no events to publish without the prefix cache",
            ),
            (("--max-connections", 0), "--max-connections: 0 is not allowed"),
        ):
            run = cbatch("serve", *flags)
            assert run.status == 2 and message in run.err, run.err
    run = cbatch("serve", tmp_path)
    assert "has no config.json; name a Hugging Face model directory" in run.err
    assert not started


def test_a_setting_may_have_an_older_name(tmp_path: Path) -> None:
    for text, variables, flags in (
        ("step_budget = 99", {}, ()),
        ("max_num_batched_tokens = 99", {}, ()),
        ("step_budget = 1", {"CBATCH_STEP_BUDGET": "99"}, ()),
        ("step_budget = 1", {"CBATCH_MAX_NUM_BATCHED_TOKENS": "99"}, ()),
        ("", {"CBATCH_STEP_BUDGET": "1"}, ("--step-budget", "99")),
        ("", {}, ("--max-num-batched-tokens", "99")),
    ):
        settings = read(tmp_path, text, variables, *flags)
        assert settings.values.engine.max_num_batched_tokens == 99
    assert not unknown_variables({"CBATCH_STEP_BUDGET": "1"}, ServeSettings)
