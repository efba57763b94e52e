from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cbatch.engine.model_files import sampling_defaults
from cbatch.runtime.model.config import ModelError
from tests.gguf_files import gguf_bytes


def write(folder: Path, **values: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_only_the_fields_that_vllm_reads_count(tmp_path: Path) -> None:
    sampling = {"temperature": 1, "top_k": 20, "top_p": 0.8, "min_p": 0.05}
    ignored = {"do_sample": False, "eos_token_id": [1, 2], "num_beams": 4, "from_the_future": "x"}
    model = write(tmp_path, repetition_penalty=1.05, max_new_tokens=2048, **sampling, **ignored)
    want = sampling | {"repetition_penalty": 1.05, "max_tokens": 2048}
    assert sampling_defaults(model) == want


def gguf(folder: Path, **values: Any) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(gguf_bytes({f"general.sampling.{k}": v for k, v in values.items()}, {}))
    return path


def test_defaults_in_the_metadata_of_a_gguf_file(tmp_path: Path) -> None:
    write(tmp_path, temperature=0.1)  # the value in the folder's file does not count
    assert sampling_defaults(gguf(tmp_path)) == {}
    sampling = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.1}
    ignored = {"penalty_last_n": 64, "mirostat": 2, "xtc_probability": 0.5, "sequence": "k;p"}
    defaults = sampling_defaults(gguf(tmp_path, **sampling, **ignored))
    names = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
    assert defaults == {names.get(name, name): value for name, value in sampling.items()}
    assert sampling_defaults(gguf(tmp_path, top_k=0)) == {}


@pytest.mark.parametrize(("name", "value"), [("temp", -0.5), ("top_k", "x")])
def test_a_bad_value_in_a_gguf_file_is_named_with_its_key(
    tmp_path: Path, name: str, value: Any
) -> None:
    with pytest.raises(ModelError) as caught:
        sampling_defaults(gguf(tmp_path, **{name: value}))
    message = str(caught.value)
    assert message.startswith(
        f"{tmp_path / 'model.gguf'}: general.sampling.{name}: {value!r} is not"
    )
    assert 'generation_config="none"' in message


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("temperature", -0.5, "use 0 (greedy) or a finite positive number"),
        ("top_k", -2, "use at least 1"),
        ("max_new_tokens", True, "Expected `int`"),
    ],
)
def test_a_bad_value_is_named_with_file_and_field(
    tmp_path: Path, field: str, value: Any, remedy: str
) -> None:
    with pytest.raises(ModelError) as caught:
        sampling_defaults(write(tmp_path, **{field: value}))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'generation_config.json'}: {field}: {value!r} is not")
    assert remedy in message and 'generation_config="none"' in message
