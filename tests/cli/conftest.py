"""The command `cbatch` in this process, with an engine without a model."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cbatch.cli.main import main, make_parser
from cbatch.cli.serve_settings import ServeSettings
from cbatch.cli.settings import Settings, read_settings
from cbatch.engine.engine import Engine
from cbatch.engine.info import EngineInfo
from cbatch.engine.options import EngineOptions
from tests.toy_engine import make_engine

INFO = EngineInfo(
    model="toy",
    draft=None,
    dtype="float32",
    device="cpu",
    numerics="invariant",
    batch_invariant=True,
    batch_invariance="batch_invariant: yes",
    lookahead="fixed:3",
    drafter=("model",),
    weight_bytes=2**22,
    num_blocks=64,
    block_size=16,
    kv_cache_memory_bytes=2**20,
    max_model_len=128,
    num_threads=1,
)


@dataclass
class Run:
    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]


_parser = functools.cache(make_parser)


def read_serve(
    folder: Path, text: str = "", variables: dict[str, str] | None = None, *flags: str
) -> Settings[ServeSettings]:
    """Read settings of `cbatch serve` from the text of a file, variables and flags."""
    file = folder / "serve.toml"
    file.write_text(text)
    args = _parser("serve").parse_args(["serve", *flags])
    return read_settings(ServeSettings, args, variables, file)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Return the list of engines that commands have loaded, the latest last."""
    loaded: list[Engine] = []

    def load(model: Any, draft: Any, options: EngineOptions) -> tuple[Engine, EngineInfo]:
        sizes = {"num_blocks": 512, "max_model_len": 600, "block_size": 8}
        loaded.append(make_engine(max_num_seqs=options.max_num_seqs, seed=options.seed, **sizes))
        return loaded[-1], INFO

    for command in ("chat", "demo", "generate"):
        monkeypatch.setattr(f"cbatch.cli.{command}.load_engine", load)
    return loaded


@pytest.fixture
def cbatch(
    engines: list[Engine], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Run]:
    """Return a function that runs a command line. The command's log lines go to the log of the
    tests."""
    monkeypatch.setattr("cbatch.cli.serve.configure", lambda form: None)

    def run(*argv: Any) -> Run:
        status = main([str(a) for a in argv])
        out, err = capsys.readouterr()
        return Run(status, out, err)

    return run
