"""The whole command on a tiny library and tiny shapes: every stage, and again from its saved
state."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sysconfig
from pathlib import Path

import pytest

from cbatch.runtime.cpu.decoder import load_model
from tools.demo_pair import batches, draft, evaluate, lessons, target, train
from tools.demo_pair.data import HELD_OUT_MODULES, load_corpus
from tools.demo_pair.nets import TARGET

SHAPE = dataclasses.replace(
    TARGET, num_layers=2, hidden_size=32, num_heads=2, num_kv_heads=1, intermediate_size=32
)
MODULES = ("fnmatch.py", "queue.py", "random.py", "test/test_bisect.py")
SMALL = {
    target: {"TARGET": SHAPE, "SHALLOW_LAYERS": 1, "TOKENS_PER_STEP": 512},
    draft: {"DRAFT": dataclasses.replace(SHAPE, num_layers=1), "CONTEXT_TOKENS": 32},
    lessons: {"CONTEXT_TOKENS": 32, "LESSON_ROWS": 2, "PROMPT_TOKENS": 8},
    evaluate: {"CONTINUED_TOKENS": 8, "HEADS_PER_MODULE": 2, "TIMED_REPEATS": 1},
    train: {"LESSON_PROMPTS": 16},
}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the arguments of the command."""
    library = tmp_path / "library"
    for name in MODULES:
        file = library / name
        file.parent.mkdir(parents=True, exist_ok=True)
        source = Path(sysconfig.get_paths()["stdlib"]) / name
        if source.exists():
            shutil.copy(source, file)
        else:  # a build of Python without its tests
            file.write_text("def check(value):\n    assert value + 1 > value\n" * 200)
    monkeypatch.setattr(batches, "load_corpus", lambda: load_corpus(library))
    for module, values in SMALL.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    folders = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    return [*folders, "--target-steps", "4", "--draft-steps", "3", "--threads", "2"]


def test_every_stage_leaves_a_pair_that_can_be_served(small: list[str], tmp_path: Path) -> None:
    train.main(small)
    pair = [load_model(tmp_path / "out" / name) for name in ("target", "draft")]
    assert [model.config.num_layers for model in pair] == [2, 1]
    card = (tmp_path / "out" / "README.md").read_text()
    assert all(f"`{name}`" in card for name in HELD_OUT_MODULES) and "| queue |" in card
    assert json.loads((tmp_path / "out" / "prompts.json").read_text())["functions"]
    report = json.loads((tmp_path / "work" / "report.json").read_text())
    modules = report["modules"]
    assert set(modules) == {"fnmatch", "queue"}
    assert report["total"]["tokens"] == sum(module["tokens"] for module in modules.values())
    assert 0 <= report["total"]["acceptance"] <= 1
    left = {name: (tmp_path / "work" / name).read_text() for name in ("target.json", "draft.json")}
    assert json.loads(left["target.json"])["step"] == 4
    train.main([*small, "target", "draft"])  # nothing is left to do
    for name, before in left.items():
        assert (tmp_path / "work" / name).read_text() == before


def test_an_unknown_stage_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.main(["dratf"])
    assert "stages: unknown dratf" in capsys.readouterr().err
