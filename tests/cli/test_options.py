"""Options: every setting as flag, variable, TOML key and keyword; errors name what was given."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest

from bench.load.run.options import LoadOptions
from cbatch import LLM, FieldError
from cbatch.cli import ray_serve
from cbatch.cli.main import main, make_parser
from cbatch.cli.ray_serve import build
from cbatch.cli.serve_settings import ServeSettings
from cbatch.cli.settings import (
    Setting,
    Settings,
    fields_of,
    flag_of,
    settings_of,
    unknown_variables,
)
from cbatch.core.request.request import SamplingParams
from cbatch.engine.options import EngineOptions, EngineSettings, settings_of_keywords
from cbatch.engine.unsupported import (
    UNSUPPORTED_FIELDS,
    UNSUPPORTED_OPTIONS,
    without_neutral_fields,
)
from cbatch.server.serving.tracing import span_exporter
from sim.cli.scenario import Scenario
from tests.cli.conftest import Run, read_serve

ROOT = Path(__file__).parents[2]
Command = Callable[..., Run]
COMMANDS = {
    "serve": ServeSettings,
    "generate": SamplingParams,
    "sim": Scenario,
    "bench": LoadOptions,
}
WAYS = ("flag", "variable", "file")
# Values of settings that do not take any value of their type.
VALUES: dict[str, Any] = {
    "drafter": ["suffix", "ngram"],
    "lookahead": "ema:3",
    "session_header": "x",
}
# Names of vLLM that cbatch has another name for, with that name.
VLLM = {
    "tp": "tensor_parallel_size",
    "num_gpu_blocks_override": "num_blocks",
    "seed": "engine_seed",
    "spec_model": "draft",
}
SETTINGS = {
    name: setting
    for name, setting in fields_of(ServeSettings).items()
    if name not in ("speculative_config", "num_speculative_tokens")
}


def read(tmp_path: Path, way: str, name: str, value: Any) -> Settings[ServeSettings]:
    """Read one option from a flag, an environment variable, or a TOML key."""
    text, variables, flags = "", dict[str, str](), list[str]()
    switch = isinstance(value, bool)
    if way == "file":
        text = f"{name} = {json.dumps(value)}"
    elif way == "variable":
        given = ("off", "on")[value] if switch else value
        given = ", ".join(given) if isinstance(given, list) else str(given)
        variables = {f"CBATCH_{name.upper()}": given}
    elif switch:
        flags = [flag_of(name if value else f"no_{name}")]
    else:
        values = value if isinstance(value, list) else [value]
        flags = [f"{flag_of(name)}={each}" for each in values]
    assert not unknown_variables(variables, ServeSettings)
    return read_serve(tmp_path, text, variables, *flags)


def other_value(setting: Setting) -> Any:
    """Return a value that the setting allows and that is not its default."""
    if setting.name in VALUES:
        return VALUES[setting.name]
    if get_origin(setting.plain) is Literal:
        return next(each for each in get_args(setting.plain) if each != setting.default)
    if setting.plain is bool:
        return not setting.default
    return {int: 77, float: 0.25, str: "DIR"}.get(setting.plain, ["a", "b"])


def stored(values: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a struct and of its nested structs."""
    for name in values.__struct_fields__:
        value = getattr(values, name)
        if isinstance(value, msgspec.Struct) and name in ("engine", "limits", "connections"):
            yield from stored(value)
        else:
            yield name, value


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*SETTINGS, *VLLM, "otlp_traces_endpoint"])
def test_every_setting_from_every_source(tmp_path: Path, name: str, way: str) -> None:
    setting = SETTINGS[(VLLM | {"otlp_traces_endpoint": "otlp_endpoint"}).get(name, name)]
    value = other_value(setting)
    kept = tuple(value) if isinstance(value, list) else value
    settings = read(tmp_path, way, name, value)
    before = dict(stored(ServeSettings()))
    changed = {n: v for n, v in stored(settings.values) if v != before[n]}
    assert changed == {setting.field: kept}
    origin = {"variable": f"CBATCH_{name.upper()}", "file": f"serve.toml: {name}"}
    assert settings.origin(setting.name).endswith(origin.get(way, setting.flag))
    error = settings.named(FieldError(setting.field, "is wrong", "mend it"))
    assert error.field == settings.origin(setting.name)


@pytest.mark.parametrize(
    "name", sorted(fields_of(EngineSettings).keys() & SETTINGS.keys() | VLLM.keys())
)
def test_every_option_of_an_engine_is_a_keyword(name: str) -> None:
    setting = SETTINGS[VLLM.get(name, name)]
    value = other_value(setting)
    settings = settings_of_keywords({name: value})
    kept = tuple(value) if isinstance(value, list) else value
    where = settings if setting.field == "draft" else settings.engine
    assert getattr(where, setting.field) == kept


def test_sources_override_each_other_in_order(tmp_path: Path) -> None:
    file = 'max_num_seqs = 5\nport = 7\ndrafter = ["ngram"]\n'
    variables = {"CBATCH_PORT": "8", "CBATCH_DRAFTER": "suffix, ngram"}
    settings = read_serve(tmp_path, file, variables, "--drafter", "suffix", "DIR")
    values = settings.values
    assert (values.engine.max_num_seqs, values.port, values.engine.drafter) == (5, 8, ("suffix",))
    assert values.model == "DIR" and settings.given == {"max_num_seqs", "port", "drafter", "model"}


def test_short_flags_and_sizes(tmp_path: Path) -> None:
    def engine(*words: str) -> EngineOptions:
        return read_serve(tmp_path, "", {}, *words).values.engine

    assert engine("-tp", "2").tensor_parallel_size == 2
    assert engine("-sc", '{"method": "suffix"}').drafter == ("suffix",)
    for text, number in (("2k", 2000), ("2K", 2048), ("1.5G", 3 * 2**29), ("7", 7)):
        assert engine("--max-model-len", text).max_model_len == number
    for text in ("k", "2kk", "-2k", "2 k"):
        with pytest.raises(FieldError, match="--max-model-len"):
            engine(f"--max-model-len={text}")


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "name", "value", "problem"),
    [
        ("file", "max_num_seq", 2, "is not known; did you mean max_num_seqs"),
        ("file", "max_num_seqs", "5", "Expected `int`"),
        ("variable", "port", "99999", "99999"),
        ("variable", "numerics", "exact", "'exact' is not allowed"),
        ("variable", "ray", "maybe", "maybe"),
        ("flag", "max_num_seqs", "many", "'many' is not allowed"),
        ("flag", "grace", -1, "-1"),
        ("flag", "tensor_parallel_size", 0, "0 is not allowed"),
    ],
)
def test_an_error_names_its_source(
    tmp_path: Path, way: str, name: str, value: Any, problem: str
) -> None:
    origin = {"variable": f"CBATCH_{name.upper()}", "file": name, "flag": flag_of(name)}[way]
    with pytest.raises(FieldError, match=problem) as caught:
        read(tmp_path, way, name, value)
    assert caught.value.field.endswith(origin)


def test_names_that_are_unknown_or_given_twice(tmp_path: Path) -> None:
    for accept in (settings_of_keywords, build):
        with pytest.raises(FieldError, match="is given twice.*; leave one out"):
            accept({"tp": 1, "tensor_parallel_size": 2})
    with pytest.raises(FieldError, match="MODEL: is given twice, with --model"):
        read_serve(tmp_path, "", {}, "A", "--model", "B")
    with pytest.raises(FieldError, match="^max_num_seq: is not known; did you mean max_num_seqs"):
        LLM("/nowhere", max_num_seq=2)
    with pytest.raises(FieldError, match="serve.toml: cannot be read"):
        read_serve(tmp_path, "max_num_seqs = ")
    stranger = settings_of(ServeSettings, {}, "args").named(FieldError("config.json", "x", "y"))
    assert stranger.field == "config.json"


def test_unknown_variables_are_reported_except_those_of_kubernetes(tmp_path: Path) -> None:
    cluster = {"CBATCH_SERVICE_HOST": "10.0.0.1", "CBATCH_PORT_80_TCP_ADDR": "10.0.0.1"}
    cluster["CBATCH_PORT"] = "tcp://10.0.0.1:80"
    variables = cluster | {"CBATCH_MAX_SLOT": "3", "CBATCH_CONFIG": "x", "CBATCH_KERNELS": "avx2"}
    assert unknown_variables(variables, ServeSettings) == ["CBATCH_MAX_SLOT"]
    assert read_serve(tmp_path, "", cluster).values.port == 8000


INFINITE = ("inf", "-inf", "nan", "1e300", "9" * 40)


@pytest.mark.parametrize("kind", COMMANDS.values())
def test_no_number_of_a_setting_is_infinite(kind: type[msgspec.Struct]) -> None:
    numbers = [each for each in fields_of(kind).values() if each.plain in (int, float)]
    assert len(numbers) > 10
    for setting, text in itertools.product(numbers, INFINITE):
        with pytest.raises(FieldError, match=f"^{setting.flag}: .* is not allowed"):
            setting.convert(text, setting.flag, strict=False)
    for name, value in (("timeout", math.nan), ("grace", 1e300)):
        with pytest.raises(FieldError, match=f"file: {name}: .* is not allowed"):
            settings_of(ServeSettings, {name: value}, "file")


def test_errors_at_start_name_the_remedy(
    cbatch: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
            ((str(tmp_path),), "has no config.json; name a Hugging Face model directory"),
            (("--record", tmp_path / "notes"), "notes cannot be written"),
            (("--record", tmp_path / "no" / "log"), "log cannot be written"),
            (("--max-requests-per-key", "2"), "--max-requests-per-key: there are no keys"),
            (("--api-key-file", tmp_path / "none"), "--api-key-file: "),
            (("--config", tmp_path / "none"), "none: cannot be read"),
            (("--chat-template", tmp_path / "none"), "none cannot be read"),
            ((tmp_path / "nothing",), str(tmp_path / "nothing")),
            (("--grace", "1", "--timeout", "-1"), "--timeout: -1.0 is not allowed"),
            (("--max-connections", 2**40), f"--max-connections: {2**40} need"),
            (("--max-connections", 0), "--max-connections: 0 is not allowed"),
            (("--cors-origin", "localhost:3000"), "is not an origin; give a scheme"),
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
            *(((flag, "2"), f"{flag}: is for replicas only") for flag in REPLICAS),
        ):
            run = cbatch("serve", *flags)
            assert run.status == 2 and message in run.err, run.err
    assert not started


REPLICAS = ("--min-replicas", "--max-replicas", "--session-header")


# ---- options and fields of other engines ---------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "way"), [*zip(UNSUPPORTED_OPTIONS, itertools.cycle((*WAYS, "keyword")), strict=False)]
)
def test_an_option_that_is_not_supported(tmp_path: Path, name: str, way: str) -> None:
    """A neutral value is accepted, and another value is rejected by the name that was given."""

    def give(value: Any) -> object:
        if way == "keyword":
            return settings_of_keywords({name: value})
        return read(tmp_path, way, name, value).values

    neutral = UNSUPPORTED_OPTIONS[name].neutral
    switch = any(isinstance(value, bool) for value in neutral)
    (wrong,) = {True, False} - set(neutral) if switch else ("x",)
    flag = flag_of(name if wrong is not False else f"no_{name}")
    with pytest.raises(FieldError, match="is not supported") as caught:
        give(wrong)
    origin = {"flag": flag, "variable": f"CBATCH_{name.upper()}"}.get(way, name)
    assert caught.value.field.endswith(origin) and caught.value.remedy
    for value in neutral:
        if way == "keyword" or not isinstance(value, dict | list):
            assert give(value) == (EngineSettings() if way == "keyword" else ServeSettings())


@pytest.mark.parametrize("field", sorted(UNSUPPORTED_FIELDS))
def test_a_field_of_requests_that_is_not_supported(field: str) -> None:
    with pytest.raises(FieldError, match=f"^{field}: .* is not supported"):
        without_neutral_fields({field: {"anything": 2}})
    for neutral in (None, *UNSUPPORTED_FIELDS[field].neutral):
        assert without_neutral_fields({field: neutral, "n": 2}) == {"n": 2}


def test_the_readme_lists_unsupported_features() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.split("## What it does not do")[1].split("\n## ")[0].lower()
    missing = "tool calls, quantised weights, gguf, lora, recurrent layers, tensor parallelism"
    missing += ", eagle, mtp, kv offload, embeddings, multimodal"
    assert [name for name in missing.split(", ") if name not in table] == []


MODEL = {"model": "DIR"}


@pytest.mark.parametrize("way", ["flag", "variable", "keyword"])
@pytest.mark.parametrize(
    ("config", "draft", "changes"),
    [
        ({"method": "ngram"}, None, {"drafter": ("ngram",)}),
        (
            {"method": "suffix", "num_speculative_tokens": 3},
            None,
            {"drafter": ("suffix",), "lookahead": "adaptive:3"},
        ),
        (
            MODEL | {"num_speculative_tokens": 2, "draft_tensor_parallel_size": 1},
            "DIR",
            {"lookahead": "adaptive:2"},
        ),
        (MODEL | {"method": "eagle3"}, "DIR", {"draft_method": "eagle3"}),
        (
            {"method": "mtp", "num_speculative_tokens": 2},
            None,
            {"draft_method": "mtp", "lookahead": "adaptive:2"},
        ),
    ],
    ids=str,
)
def test_speculative_config(
    tmp_path: Path, config: dict[str, Any], draft: str | None, changes: dict[str, Any], way: str
) -> None:
    if way == "keyword":
        settings = settings_of_keywords({"speculative_config": config})
    else:
        settings = read(tmp_path, way, "speculative_config", json.dumps(config)).values
    assert (settings.draft, settings.engine) == (draft, EngineOptions(**changes))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"lookahead": "off", "num_speculative_tokens": 2}, "2 and lookahead off exclude"),
        ({"lookahead": "fixed:3", "num_speculative_tokens": 2}, "2 and lookahead fixed:3 exclude"),
        ({"draft": "A", "speculative_config": {"model": "B"}}, "draft or drafter exclude"),
        ({"num_blocks": 2, "gpu_memory_utilization": 0.5}, "gpu_memory_utilization: would be ign"),
        ({"speculative_config": {"methd": "ngram"}}, "methd.*method, num_speculative_tokens"),
        ({"speculative_config": {"method": "mlp_speculator"}}, r"mlp.*prompt_lookup_min"),
        ({"drafter": ("mtp",), "draft_method": "eagle"}, "mtp and method eagle exclude each other"),
        ({"speculative_config": {"num_speculative_tokens": 3}}, "give a model"),
        ({"speculative_config": {"method": "mtp"}, "drafter": ("ngram",)}, "drafter exclude"),
        (
            {"speculative_config": {"method": "ngram", "prompt_lookup_max": 5}},
            "prompt_lookup_max 5 is not supported; use 4",
        ),
    ],
    ids=str,
)
def test_options_that_are_refused_together(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(FieldError, match=problem):
        settings_of_keywords(options)


# ---- flags of commands ---------------------------------------------------------------------------

# Flags with the same name but different meaning: a server's model is not a simulated model.
OTHERS = {
    "--model": "weights, the name of a shape, or the name that a server gives its model",
    "--seed": "of what the command itself draws",
    "--draft": "weights, or the name of a shape",
    "--requests": "of a trace, or of each run",
    "--concurrency": "one number of clients, or several",
    "--rate": "one rate, or several",
    "--processes": "of scenarios, or of the client",
    "--records": "of requests, or of calls",
    "--page": "of plots, or of runs",
    "--json": "the whole report, or the figures",
    "--timeout": "of a server's calls by default, or of a client's",
    "--output": "a file, or a length",
    "--api-key": "of clients that a server takes, or of the client",
    "--sweep": "over values, or over loads",
    "--trace": "the other name of a positional argument",
}
# The default engine of a simulation is on an H100, and values of a cost model or log come first:
# the struct has None.


def actions(command: str) -> dict[str, argparse.Action]:
    """Return the actions by option string, hidden options included."""
    (commands,) = (
        action
        for action in make_parser(command)._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    options: dict[str, argparse.Action] = commands.choices[command]._option_string_actions
    return options


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(COMMANDS, 2)))
def test_the_same_option_has_one_name_and_one_help_text(one: str, other: str) -> None:
    first, second = actions(one), actions(other)
    for flag in (first.keys() & second.keys()) - OTHERS.keys() - {"-h", "--help"}:
        a, b = first[flag], second[flag]
        assert (a.help or "").partition(" (default")[0] == (b.help or "").partition(" (default")[0]
        assert (a.metavar, a.choices, a.dest) == (b.metavar, b.choices, b.dest), flag
        assert {*a.option_strings} == {*b.option_strings}, flag


def test_help_shows_each_option_by_one_name_and_a_default_that_it_has() -> None:
    options = actions("serve")
    for name in (*VLLM, *UNSUPPORTED_OPTIONS, "model"):
        if name not in ("reasoning_parser", "seed"):
            assert options[flag_of(name)].help == argparse.SUPPRESS, name
    for command in COMMANDS:
        assert not [a for a in actions(command).values() if "NODEFAULT" in (a.help or "")]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("serve --tensor 2", "--tensor-parallel-size"),
        ("serve --max-num-seq-s 2", "--max-num-seqs"),
        ("bench http://x --concur 2", "--concurrency"),
        ("advise steps.jsonl --proc 2", "--processes"),
        ("calibrate --ou c.json --out d.json", "--out"),
    ],
)
def test_an_abbreviation_is_refused_and_its_option_named(
    capsys: pytest.CaptureFixture[str], words: str, meant: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


# ---- replicas on Ray Serve -----------------------------------------------------------------------


def test_without_ray_the_extra_is_named(cbatch: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ray", "ray.serve"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(FieldError, match=r"ray: .*pip install 'cbatch\[ray\]'"):
        build({})
    run = cbatch("serve", "--ray")
    assert run.status == 2 and "--ray" in run.err and "cbatch[ray]" in run.err


def test_settings_that_replicas_do_not_support_are_rejected_by_name(cbatch: Command) -> None:
    for name in ray_serve._REFUSED:
        run = cbatch("serve", "--ray", flag_of(name), 1)
        assert run.status == 2
        assert run.err.startswith(f"cbatch: {flag_of(name)}: is not available with replicas: ")
    for name, value in {"host": "0.0.0.0", "port": 1, "ray": True, "session_header": "x"}.items():
        with pytest.raises(FieldError, match=f"args: {name}: is not available with replicas"):
            build({name: value})
    with pytest.raises(FieldError, match="args: max_replicas: 1 is less than min_replicas, 2"):
        build({"min_replicas": 2, "max_replicas": 1})


# ---- the collector of traces ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "protocol"),
    [("localhost:4317", None), ("grpc://collector:4318", "http/protobuf"), ("", "grpc")],
)
def test_an_endpoint_that_cannot_be_used_is_refused(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, protocol: str | None
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol or "")
    with pytest.raises(FieldError, match=r"otlp_endpoint: cannot export .*http://localhost:4317"):
        span_exporter(endpoint)


def test_without_opentelemetry_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, cbatch: Command
) -> None:
    for module in list(sys.modules):
        if module.partition(".")[0] == "opentelemetry":
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    run = cbatch("serve", "--otlp-traces-endpoint", "http://localhost:4317")
    assert run.status == 2 and run.err.count("\n") == 1
    assert "--otlp-endpoint: needs OpenTelemetry" in run.err and "cbatch[otel]" in run.err
