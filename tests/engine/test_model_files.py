"""GGUF files instead of model directories, and models by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cbatch import LLM, SamplingParams
from cbatch.core.request.errors import FieldError
from cbatch.engine.model_files import (
    PACKAGED,
    PackagedModel,
    chat_template_of,
    find_model,
    gguf_of,
    sampling_defaults,
    tokenizer_of,
)
from cbatch.runtime.model import gguf_file
from cbatch.runtime.model.config import ModelError
from cbatch.text import TokenizerError
from tests.gguf_files import Q8_0, convert, gguf_bytes
from tests.runtime.hf_models import build
from tests.smollm2 import needs_gemma3, needs_smollm2
from tests.text.test_gguf_tokenizer import BYTE_LEVEL

TEMPLATE = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with random weights and all files that a chat needs."""
    folder = tmp_path_factory.mktemp("tiny")
    build(folder, "llama", vocab_size=352)
    values, tensors = convert(folder, Q8_0)
    path = folder / "tiny.gguf"
    more = {"tokenizer.chat_template": TEMPLATE, "tokenizer.ggml.add_bos_token": True}
    path.write_bytes(gguf_bytes(values | BYTE_LEVEL | more, tensors))
    return path


def test_text_in_and_out(tiny: Path) -> None:
    tokenizer, template = tokenizer_of(tiny), chat_template_of(tiny)
    assert template is not None
    chat = template.render([{"role": "user", "content": "for item"}])
    assert chat == "for item<|end|>"
    (one,) = LLM(tiny, max_num_seqs=2, draft=tiny).generate(chat, GREEDY)
    assert list(one.prompt_token_ids) == tokenizer.encode(chat)
    assert one.prompt_token_ids[0] == 0 and one.prompt_token_ids[-1] == 343
    assert one.text == tokenizer.decode(one.token_ids)


def test_a_file_is_read_once(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Config, weights, tokenizer and template share one read, while a reference remains and the
    file is unchanged."""
    read: list[Path] = []
    whole = gguf_file.read_parts
    monkeypatch.setattr(gguf_file, "read_parts", lambda path: read.append(path) or whole(path))
    LLM(tiny, draft=tiny, max_num_seqs=2)
    assert read == [tiny]
    gguf = gguf_of(tiny)
    assert chat_template_of(tiny) is not None and tokenizer_of(tiny).vocab_size > 300
    assert read == [tiny] * 2
    os.utime(tiny, ns=(0, tiny.stat().st_mtime_ns + 1))
    assert gguf_of(tiny) is not gguf
    del gguf
    tokenizer_of(tiny)
    assert len(read) == 4


def test_a_draft_has_its_targets_tokenizer(tiny: Path, tmp_path: Path) -> None:
    values, tensors = convert(tiny.parent)
    tokens = [*BYTE_LEVEL["tokenizer.ggml.tokens"]]
    tokens[-2] = "<thought>"
    other = tmp_path / "other.gguf"
    other.write_bytes(gguf_bytes(values | BYTE_LEVEL | {"tokenizer.ggml.tokens": tokens}, tensors))
    with pytest.raises(TokenizerError, match="draft: the tokenizer of .*other.gguf differs"):
        LLM(tiny, draft=other)
    with pytest.raises(FieldError, match="draft: .*model.gguf: no such model"):
        LLM(tiny, draft=tmp_path / "model.gguf")


def test_models_by_name(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(PACKAGED, "tiny", PackagedModel("tiny.gguf", "", 1, {}))
    with pytest.raises(FieldError, match=r"model: tiny is not on this machine; run cbatch get t"):
        LLM("tiny")
    with pytest.raises(FieldError, match=r"draft: tiny .*; run cbatch get tiny"):
        LLM(tiny, draft="tiny")
    path = tmp_path / "cbatch" / "models" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(tiny.read_bytes())
    assert find_model("tiny") == path
    assert tokenizer_of("tiny").vocab_size == tokenizer_of(tiny).vocab_size
    expected = LLM(tiny).generate("for item", GREEDY)[0].text
    assert LLM("tiny").generate("for item", GREEDY)[0].text == expected
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert find_model("tiny") == "tiny"  # a local folder comes first


TEXTS = ("  leading spaces and\ttabs\n\n\n  x", "Việt Nam ĐẸP")
# Token ids of TEXTS by llama.cpp for the same files.
SMOLLM2_IDS = (
    [216, 2899, 5600, 284, 197, 100, 7366, 1116, 3805, 1792],
    [43298, 25275, 225, 100, 18620, 24488, 234, 31604, 133, 64],
)
GEMMA3_IDS = (
    [138, 26016, 9952, 532, 255968, 39218, 109, 138, 236781],
    [31422, 13459, 11774, 7968, 247037, 236791],
)


@pytest.mark.parametrize(
    ("name", "rows_of_ids"),
    [
        pytest.param("smollm2", SMOLLM2_IDS, marks=needs_smollm2),
        pytest.param("gemma3-270m", GEMMA3_IDS, marks=needs_gemma3),
    ],
)
def test_packaged_models_encode_as_llama_cpp(name: str, rows_of_ids: tuple[list[int], ...]) -> None:
    tokenizer = tokenizer_of(name)
    for text, ids in zip(TEXTS, rows_of_ids, strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


# --- sampling defaults ----------------------------------------------------------------------------


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


@pytest.mark.parametrize(("name", "value"), [("temp", -0.5)])
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
