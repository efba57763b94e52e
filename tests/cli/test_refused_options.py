"""Abbreviations, and numbers that no option takes, are refused by name."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from bench.load.run.options import LoadOptions
from cbatch.cli.main import main
from cbatch.cli.serve_settings import ServeSettings
from cbatch.cli.settings import fields_of, settings_of
from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import SamplingParams
from sim.cli.scenario import Scenario
from tests.cli.conftest import Run

ROOT = Path(__file__).parents[2]
Command = Callable[..., Run]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("serve --tensor 2", "--tensor-parallel-size"),
        ("chat --temp=0", "--temperature"),
        ("generate x --max-tok 2", "--max-tokens"),
        ("sim t.csv --replica 2", "--replicas"),
        ("bench http://x --concur 2", "--concurrency"),
        ("trace show t.csv --plo p", "--plot"),
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


@pytest.mark.parametrize(
    "bench",
    ["bench.stalls", "bench.peers", "bench.lookahead", "bench.scheduler"],
)
def test_benches_take_no_abbreviations(bench: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", bench, "--repeat", "2"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and "unrecognized arguments: --repeat" in done.stderr


INFINITE = ("inf", "-inf", "nan", "1e300", "9" * 40)


@pytest.mark.parametrize("kind", [ServeSettings, SamplingParams, Scenario, LoadOptions])
def test_no_number_of_a_setting_is_infinite(kind: type[msgspec.Struct]) -> None:
    numbers = [each for each in fields_of(kind).values() if each.plain in (int, float)]
    assert len(numbers) > 10
    for setting in numbers:
        for name in setting.names:
            for text in INFINITE:
                with pytest.raises(FieldError, match="is not allowed") as refused:
                    setting.convert(text, f"--{name}", name, strict=False)
                assert refused.value.field == f"--{name}", (name, text)
    for name, value in (("prompt_memory", math.inf), ("timeout", math.nan), ("grace", 1e300)):
        with pytest.raises(FieldError, match=f"file: {name}: .* is not allowed"):
            settings_of(ServeSettings, {name: value}, "file")


@pytest.mark.parametrize("value", INFINITE)
@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("demo --steps-per-s", "--steps-per-s"),
        ("trace scale t.csv o.jsonl --prompt", "--prompt"),
        ("trace generate o.jsonl --requests 2 --prompt 5 --output 5 --rate", "--rate"),
        ("trace generate o.jsonl --requests 2 --rate 5 --output 5 --prompt", "--prompt"),
        ("bench http://127.0.0.1:9 --rate", "--rate"),
        ("bench http://127.0.0.1:9 --prompt-tokens", "--prompt-tokens"),
        ("bench http://127.0.0.1:9 --rate 2 --arrivals gamma:", "--arrivals"),
        ("bench http://127.0.0.1:9 --slo ttft=", "--slo"),
        ("serve --prompt-memory", "--prompt-memory"),
        ("generate x --temperature", "--temperature"),
    ],
)
def test_no_number_of_an_option_is_infinite(
    cbatch: Command, capsys: pytest.CaptureFixture[str], words: str, option: str, value: str
) -> None:
    *begin, last = words.split()
    given = f"{last}={value}" if last == option else last + value
    try:
        run = cbatch(*begin, given)
        status, said = run.status, run.err
    except SystemExit as ended:
        status, said = ended.code, capsys.readouterr().err
    assert status == 2 and f"{option}: " in said, said
