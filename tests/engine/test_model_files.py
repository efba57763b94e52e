"""GGUF files instead of model directories, and models by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cbatch import LLM, FinishReason, SamplingParams
from cbatch.core.request.errors import FieldError
from cbatch.engine.model_files import (
    PACKAGED,
    PackagedModel,
    chat_template_of,
    find_model,
    gguf_of,
    tokenizer_of,
)
from cbatch.runtime.model import gguf_file
from cbatch.text import TokenizerError
from tests.gguf_files import Q8_0, convert, gguf_bytes
from tests.runtime.hf_models import build
from tests.smollm2 import needs_smollm2
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


# Token ids by llama.cpp for the same file.
ENCODED = {
    "  leading spaces and\ttabs\n\n\n  x": [216, 2899, 5600, 284, 197, 100, 7366, 1116, 3805, 1792],
    "Việt Nam ĐẸP": [43298, 25275, 225, 100, 18620, 24488, 234, 31604, 133, 64],
}
# Greedy output of llama.cpp for the same file in fp32.
WRITTEN = {
    "What is the capital of France?": "The capital of France is Paris.",
    "List three prime numbers > 100.": "1. 11\n2. 12\n\nThese are the only two prime numbers "
    "that are greater than 100.",
}


@needs_smollm2
def test_smollm2_encodes_as_llama_cpp() -> None:
    tokenizer = tokenizer_of("smollm2")
    for text, ids in ENCODED.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@needs_smollm2
@pytest.mark.slow
def test_smollm2_generates_the_same_text_as_llama_cpp() -> None:
    template = chat_template_of("smollm2")
    assert template is not None
    prompts = [template.render([{"role": "user", "content": text}]) for text in WRITTEN]
    llm = LLM("smollm2", dtype="float32", max_num_seqs=2, max_model_len=256, lookahead="off")
    answers = llm.generate(prompts, SamplingParams(max_tokens=48, temperature=0))
    assert [each.text for each in answers] == [*WRITTEN.values()]
    assert {each.finish_reason for each in answers} == {FinishReason.STOP}
