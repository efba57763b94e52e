"""Options by all of their names: vLLM's names, which help shows, aliases, and old names, which
warn."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cbatch import LLM, FieldError
from cbatch.cli.main import make_parser
from cbatch.cli.ray_serve import build
from cbatch.cli.serve_settings import ServeSettings
from cbatch.cli.settings import Settings, flag_of, read_settings, unknown_variables
from cbatch.core.request.typed import OLD_NAMES
from cbatch.engine.options import EngineOptions, EngineSettings, settings_of_keywords
from cbatch.engine.unsupported import UNSUPPORTED_OPTIONS
from sim.cli.scenario import Scenario

Reader = Callable[..., Settings[ServeSettings]]
# By vLLM's name: a value as text, the parsed value, and cbatch's field if its name differs.
VLLM: dict[str, tuple[str, Any, str]] = {
    "max_model_len": ("300", 300, ""),
    "max_num_seqs": ("3", 3, ""),
    "max_num_batched_tokens": ("99", 99, ""),
    "tensor_parallel_size": ("2", 2, ""),
    "gpu_memory_utilization": ("0.5", 0.5, ""),
    "kv_cache_memory_bytes": ("1000000", 1_000_000, ""),
    "num_gpu_blocks_override": ("77", 77, "num_blocks"),
    "block_size": ("16", 16, ""),
    "enable_prefix_caching": ("off", False, ""),
    "scheduling_policy": ("priority", "priority", ""),
    "spec_tokens": ("5", 5, "num_speculative_tokens"),
    "spec_model": ("DIR", "DIR", "draft"),
    "dtype": ("float32", "float32", ""),
    "kv_cache_dtype": ("fp8", "fp8", ""),
    "tokenizer": ("DIR", "DIR", ""),
    "seed": ("7", 7, ""),
    "served_model_name": ("mine", "mine", ""),
    "tool_call_parser": ("hermes", "hermes", "tool_parser"),
    "model_impl": ("own", "own", ""),
    "reasoning_parser": ("none", "none", ""),
    "otlp_traces_endpoint": ("http://c:4317", "http://c:4317", "otlp_endpoint"),
}
SERVER = {
    "served_model_name",
    "tool_call_parser",
    "reasoning_parser",
    "otlp_traces_endpoint",
}  # not options of an engine
# Names that help does not show, since it shows another name.
HIDDEN = {"num_gpu_blocks_override", "otlp_traces_endpoint", "spec_tokens", "spec_model", "seed"}
OLD = {old: new for old, new in OLD_NAMES.items() if new in VLLM} | {"kv_memory": ""}
# Old names that are only names of a Python field, or only the simulator's.
KEYWORDS_ONLY = {"block_size_tokens", "kv_memory_bytes", "step_budget_tokens"}


@pytest.fixture
def read(tmp_path: Path) -> Reader:
    def read(way: str, name: str, text: str, value: Any) -> Settings[ServeSettings]:
        """Read one option from a flag, an environment variable, or a TOML key."""
        words, variables, file = ["serve"], {}, tmp_path / "serve.toml"
        if way == "flag" and isinstance(value, bool):
            words += [flag_of(name if value else f"no_{name}")]
        elif way == "flag":
            words += [flag_of(name), text]
        elif way == "variable":
            variables = {f"CBATCH_{name.upper()}": text}
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
        file.write_text(f"{name} = {shown}" if way == "file" else "")
        settings = read_settings(
            ServeSettings, make_parser("serve").parse_args(words), variables, file
        )
        assert not unknown_variables(variables, ServeSettings)
        return settings

    return read


def field_of(settings: Any, field: str) -> Any:
    where = settings.engine if field in EngineOptions.__struct_fields__ else settings
    return getattr(where, field)


def expected(field: str, value: Any) -> tuple[str, Any]:
    """Return the field and the value in which an option is stored: the number of drafts is the
    lookahead's k."""
    return (
        ("lookahead", f"adaptive:{value}") if field == "num_speculative_tokens" else (field, value)
    )


@pytest.mark.parametrize("way", ["flag", "variable", "file"])
@pytest.mark.parametrize("name", VLLM)
def test_settings_by_the_names_of_vllm(read: Reader, name: str, way: str, capsys: Any) -> None:
    text, value, field = VLLM[name]
    settings = read(way, name, text, value)
    field, value = expected(field or name, value)
    assert field_of(settings.values, field) == value
    assert not settings.warnings and not capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(VLLM.keys() - SERVER))
def test_keywords_by_the_names_of_vllm(name: str, caplog: pytest.LogCaptureFixture) -> None:
    _, value, field = VLLM[name]
    field, value = expected(field or name, value)
    assert (
        field_of(settings_of_keywords({name: value if field != "lookahead" else 5}), field) == value
    )
    assert not caplog.records


@pytest.mark.parametrize("way", ["flag", "variable", "file"])
@pytest.mark.parametrize("old", OLD)
def test_old_names_of_settings_work_and_warn(
    read: Reader, old: str, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    new = OLD_NAMES[old]
    text, value, field = VLLM[new]
    if old == "kv_memory":  # it had another unit
        text, value = "0.5", 0.5
    settings = read(way, old, text, value)
    kept = 2**29 if old == "kv_memory" else value
    assert field_of(settings.values, field or new) == kept
    warning = capsys.readouterr().err if way == "flag" else "\n".join(settings.warnings)
    assert "is deprecated; use " in warning and warning.count("\n") == (way == "flag")
    assert (flag_of(new) if way == "flag" else new) in warning.replace("no-", "")


@pytest.mark.parametrize(
    "old", sorted(OLD.keys() - SERVER - {"kv_memory", "served_name", "tool_parser"})
)
def test_old_names_of_keywords_work_and_warn(old: str, caplog: pytest.LogCaptureFixture) -> None:
    new = OLD_NAMES[old]
    value = VLLM[new][1]
    assert field_of(settings_of_keywords({old: value}), new) == value
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == f"{old} is deprecated; use {new}"


@pytest.mark.parametrize(
    "words",
    [("--max-slots", 2), ("--memory-share", "0.5"), ("--step-budget", 64), ("--no-prefix-cache",)],
)
def test_the_simulator_has_the_same_names(words: tuple[Any, ...], capsys: Any) -> None:
    args = make_parser("sim").parse_args(["sim", "TRACE", *map(str, words)])
    values = read_settings(Scenario, args).values
    new = OLD_NAMES[words[0].removeprefix("--").removeprefix("no-").replace("-", "_")]
    assert getattr(values, new) == (float(words[1]) if len(words) > 1 else False)
    assert f"warning: {words[0]} is deprecated; use --" in capsys.readouterr().err


def test_short_flags_and_sizes() -> None:
    def engine(*words: str) -> EngineOptions:
        args = make_parser("serve").parse_args(["serve", *words])
        return read_settings(ServeSettings, args).values.engine

    assert engine("-tp", "2").tensor_parallel_size == engine("--tp", "2").tensor_parallel_size == 2
    assert engine("-sc", '{"method": "suffix"}').drafter == ("suffix",)
    for text, number in (("2k", 2000), ("2K", 2048), ("1.5G", 3 * 2**29), ("7", 7)):
        assert engine("--max-model-len", text).max_model_len == number
    for text in ("k", "2kk", "-2k", "2 k"):
        with pytest.raises(FieldError, match="--max-model-len"):
            engine(f"--max-model-len={text}")


def test_a_name_given_twice_and_unknown_names(tmp_path: Path, read: Reader) -> None:
    for options in ({"max_slots": 1, "max_num_seqs": 2}, {"tp": 1, "tensor_parallel_size": 2}):
        with pytest.raises(FieldError, match="is given twice.*; leave one out"):
            settings_of_keywords(options)
        with pytest.raises(FieldError, match="is given twice.*; leave one out"):
            build(options)
    with pytest.raises(FieldError, match="^max_num_seq: is not known; did you mean max_num_seqs"):
        LLM("/nowhere", max_num_seq=2)
    with pytest.raises(FieldError, match="serve.toml: max_num_seq: is not known; did you mean"):
        read("file", "max_num_seq", "2", 2)
    assert unknown_variables({"CBATCH_MAX_NUM_SEQ": "2"}, ServeSettings) == ["CBATCH_MAX_NUM_SEQ"]


def test_unknown_flags_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser("serve").parse_args(["serve", "--max-num-seq-s", "2"])
    error = capsys.readouterr().err
    assert "--max-num-seq-s" in error and "did you mean --max-num-seqs" in error


@pytest.mark.parametrize("name", UNSUPPORTED_OPTIONS)
def test_options_that_are_not_supported(name: str, read: Reader) -> None:
    """From every source, a neutral value is accepted, and another value is rejected by the name
    that was given."""
    option = UNSUPPORTED_OPTIONS[name]
    switch = any(isinstance(value, bool) for value in option.neutral)
    (wrong,) = {True, False} - set(option.neutral) if switch else ("x",)
    for way, origin in (
        ("flag", flag_of(name if wrong is not False else f"no_{name}")),
        ("variable", f"CBATCH_{name.upper()}"),
        ("file", name),
        ("keyword", name),
    ):
        with pytest.raises(FieldError) as caught:
            give(read, way, name, wrong)
        assert caught.value.field.endswith(origin), way
        assert "is not supported" in caught.value.problem and caught.value.remedy
        for neutral in option.neutral:
            if not isinstance(neutral, dict | list) or way == "keyword":
                settings = give(read, way, name, neutral)
                assert settings == (EngineSettings() if way == "keyword" else ServeSettings())


def give(read: Reader, way: str, name: str, value: Any) -> object:
    if way == "keyword":
        return settings_of_keywords({name: value})
    return read(way, name, str(value), value).values


MODEL = {"model": "DIR"}


@pytest.mark.parametrize(
    ("config", "draft", "changes"),
    [
        ({"method": "ngram"}, None, {"drafter": ("ngram",)}),
        (
            {"method": "suffix", "num_speculative_tokens": 3},
            None,
            {"drafter": ("suffix",), "lookahead": "adaptive:3"},
        ),
        (MODEL, "DIR", {}),
        (
            MODEL | {"num_speculative_tokens": 2, "draft_tensor_parallel_size": 1},
            "DIR",
            {"lookahead": "adaptive:2"},
        ),
        (MODEL | {"method": "eagle3"}, "DIR", {"draft_method": "eagle3"}),
        (
            {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2},
            None,
            {"drafter": ("ngram",)},
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("way", ["flag", "variable", "file", "keyword"])
def test_speculative_config(
    read: Reader, config: dict[str, Any], draft: str | None, changes: dict[str, Any], way: str
) -> None:
    settings = speculate(read, way, config)
    assert (settings.draft, settings.engine) == (draft, EngineOptions(**changes))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"methd": "ngram"}, ("methd", "method, num_speculative_tokens")),
        ({"method": "mtp"}, ("mtp", "$.method", "prompt_lookup_min")),
        ({"method": "ngram", "num_speculative_tokens": 99}, ("<= 32", "$.num_speculative_tokens")),
        (
            {"method": "ngram", "model": "DIR"},
            ("'ngram' with model 'DIR'", "method ngram or suffix"),
        ),
        ({"num_speculative_tokens": 3}, ("give a model",)),
        ({"method": "ngram", "prompt_lookup_max": 5}, ("prompt_lookup_max 5", "use 4")),
        (MODEL | {"draft_tensor_parallel_size": 2}, ("draft_tensor_parallel_size 2", "use 1")),
    ],
    ids=str,
)
@pytest.mark.parametrize("way", ["flag", "file", "keyword"])
def test_a_wrong_speculative_config(
    read: Reader, config: dict[str, Any], words: tuple[str, ...], way: str
) -> None:
    with pytest.raises(FieldError) as caught:
        speculate(read, way, config)
    assert all(word in str(caught.value) for word in words), caught.value


def speculate(read: Reader, way: str, config: dict[str, Any]) -> EngineSettings:
    if way == "keyword":
        return settings_of_keywords({"speculative_config": config})
    import json

    if way == "file":
        pairs = ", ".join(f"{name} = {json.dumps(value)}" for name, value in config.items())
        return read(way, "speculative_config", "", Inline(f"{{{pairs}}}")).values
    return read(way, "speculative_config", json.dumps(config), None).values


class Inline(str):
    """A table of TOML."""

    def __repr__(self) -> str:
        return str(self)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"lookahead": "off", "num_speculative_tokens": 2}, "2 and lookahead off exclude"),
        ({"lookahead": "fixed:3", "num_speculative_tokens": 2}, "2 and lookahead fixed:3 exclude"),
        ({"draft": "A", "speculative_config": {"model": "B"}}, "draft or drafter exclude"),
        ({"drafter": "ngram", "speculative_config": {"method": "suffix"}}, "draft or drafter"),
        ({"num_blocks": 2, "gpu_memory_utilization": 0.5}, "gpu_memory_utilization: would be ign"),
    ],
    ids=str,
)
def test_options_that_exclude_each_other(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(FieldError, match=problem):
        settings_of_keywords(options)


def test_help_shows_each_option_by_one_name() -> None:
    (commands,) = (
        action
        for action in make_parser("serve")._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    help_text = commands.choices["serve"].format_help()
    for name in VLLM.keys() - HIDDEN:
        assert f"{flag_of(name)} " in help_text or f"{flag_of(name)}," in help_text, name
    for hidden in (*OLD_NAMES, *UNSUPPORTED_OPTIONS, "num_gpu_blocks_override", "spec_tokens"):
        assert f"{flag_of(hidden)} " not in help_text, hidden
