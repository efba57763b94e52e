"""End tokens that only a tokenizer's files name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models

from cbatch import LLM, SamplingParams
from cbatch.runtime.model.config import ModelError
from cbatch.runtime.model.config_json import load_config
from tests.chained_model import byte_tokens, write_chained

TEXT = "hi<|im_end|>xyz"
START, END = 256, 258  # <|endoftext|>, <|im_end|>
CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"
WHOLE = {"content": "<|im_end|>", "lstrip": False, "special": True}


def directory(folder: Path, eos: int | None = START, **files: Any) -> Path:
    raw = byte_tokens()
    path = write_chained(folder / "model", raw, raw.encode(TEXT).ids, eos=eos)
    for name, values in files.items():
        (path / f"{name}.json").write_text(json.dumps(values))
    return path


@pytest.mark.parametrize(
    ("files", "impl"),
    [
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, "own"),
        ({"tokenizer_config": {"eos_token": WHOLE}}, "transformers"),
        ({"special_tokens_map": {"eos_token": "<|im_end|>"}}, "own"),
        ({"special_tokens_map": {"eos_token": WHOLE}, "tokenizer_config": {}}, "own"),
    ],
)
def test_a_text_ends_where_the_tokenizer_says(tmp_path: Path, files: Any, impl: str) -> None:
    llm = LLM(directory(tmp_path, **files), num_blocks=64, model_impl=impl)
    done = llm.generate("h", SamplingParams(max_tokens=6, temperature=0))[0]
    assert (done.text, done.finish_reason) == ("i", "stop") and done.token_ids[-1] == END
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    assert llm.generate("h", params)[0].text == "ixy"


def test_the_tokenizer_of_another_directory_counts(tmp_path: Path) -> None:
    other = directory(tmp_path / "other", tokenizer_config={"eos_token": "<|im_end|>"})
    llm = LLM(directory(tmp_path / "own"), num_blocks=64, tokenizer=str(other))
    assert llm.engine.scheduler.config.eos_ids == (START, END)


def ids(path: Path) -> tuple[int, ...]:
    return load_config(path).eos_token_ids


def test_which_files_name_it(tmp_path: Path) -> None:
    assert ids(directory(tmp_path / "a")) == (START,), "an end token by its text alone is none"
    assert ids(directory(tmp_path / "b", eos=None)) == (START, END), "unless no file names one"
    both = {
        "tokenizer_config": {"eos_token": "<|im_end|>"},
        "generation_config": {"eos_token_id": 9},
    }
    assert ids(directory(tmp_path / "c", **both)) == (START, 9, END)
    odd = {"eos_token": "absent", "added_tokens_decoder": 5}
    assert ids(directory(tmp_path / "d", tokenizer_config=odd)) == (START,)
    path = directory(tmp_path / "e", tokenizer_config={"eos_token": "<|im_end|>"})
    for damage in ("", "{", '{"added_tokens": 5}', '{"added_tokens": [], "model": {"vocab": 5}}'):
        (path / "tokenizer.json").write_text(damage)  # `load_tokenizer` reports it
        assert ids(path) == (START,)
    (path / "tokenizer.json").unlink()
    assert ids(path) == (START,)


@pytest.mark.parametrize(
    "model",
    [
        models.BPE(vocab={"a": 0, "</s>": 5}, merges=[]),
        models.WordLevel(vocab={"a": 0, "</s>": 5}, unk_token="a"),
        models.Unigram(
            [("a", 0.0), *((f"b{i}", -1.0) for i in range(4)), ("</s>", -1.0)], unk_id=0
        ),
    ],
    ids=["BPE", "WordLevel", "Unigram"],
)
def test_an_end_token_of_the_vocabulary_itself(tmp_path: Path, model: models.Model) -> None:
    path = directory(tmp_path, tokenizer_config={"eos_token": "</s>"})
    Tokenizer(model).save(str(path / "tokenizer.json"))
    assert ids(path) == (START, 5)
    raw = Tokenizer(model)
    raw.add_special_tokens([AddedToken("<|eot_id|>", special=True)])
    raw.save(str(path / "tokenizer.json"))
    (path / CONFIG).write_text(json.dumps({"eos_token": "<|eot_id|>"}))
    assert ids(path) == (START, raw.token_to_id("<|eot_id|>"))


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("config.json", os.mkfifo),
        ("generation_config.json", lambda file: file.symlink_to("/dev/zero")),
        (CONFIG, Path.mkdir),
        (MAP, os.mkfifo),
    ],
)
def test_what_is_no_regular_file_is_named(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    path = directory(tmp_path)
    (path / name).unlink(missing_ok=True)
    make(path / name)
    with pytest.raises(ModelError, match=f"{name}: is a folder, a pipe or a device"):
        load_config(path)


@pytest.mark.parametrize("name", [CONFIG, MAP])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    path = directory(tmp_path)
    (path / name).write_text("{")
    with pytest.raises(ModelError, match=f"{name}: cannot be read as JSON"):
        load_config(path)
