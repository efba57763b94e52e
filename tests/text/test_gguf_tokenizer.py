from __future__ import annotations

import json
import os
import random
from functools import lru_cache
from pathlib import Path
from typing import Any
from unicodedata import is_normalized

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from cbatch.runtime.model.gguf_file import read_gguf
from cbatch.text import TextTokenizer, TokenizerError, load_chat_template
from cbatch.text.gguf_tokenizer import gguf_tokenizer, gguf_tokenizer_config
from tests.text.toy_tokenizers import CORPUS, byte_level

TEXTS = [*CORPUS[:4], "  two  spaces\n\n\tand it's 12345 o'clock", "naïve — “quotes” <|end|>x"]


def _byte_level() -> dict[str, Any]:
    """Metadata of a byte-level tokenizer trained in memory, with tokens of every type."""
    model = json.loads(byte_level().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    more = ["<|end|>", "<think>", "[PAD402]"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens + more,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1) + [3, 4, 5],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": len(tokens),
    }


BYTE_LEVEL = _byte_level()
TWICE = "ggml.tokens: a token appears twice"
# Scores decide which pair is merged first: "lo" before "el".
PIECES = ["<unk>", "<s>", "</s>", "▁", "h", "e", "l", "o", "lo", "el", "hel", "▁hello", "llo", "▁h"]
SENTENCE_PIECE: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": PIECES + [f"<0x{byte:02X}>" for byte in range(256)],
    "tokenizer.ggml.scores": [0.0] * 3 + [-float(i) for i in range(len(PIECES) - 3)] + [0.0] * 256,
    "tokenizer.ggml.token_type": [2, 3, 3] + [1] * (len(PIECES) - 3) + [6] * 256,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def as_read(metadata: dict[str, Any]) -> dict[str, Any]:
    return {
        key: np.array(v) if isinstance(v, list) and not isinstance(v[0], str) else v
        for key, v in metadata.items()
        if v is not None
    }


def rebuilt(metadata: dict[str, Any], **changes: Any) -> TextTokenizer:
    values = metadata | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return gguf_tokenizer(as_read(values), "x.gguf")


def test_a_byte_level_tokenizer_equals_its_original() -> None:
    original, loaded = TextTokenizer(byte_level(), "memory"), rebuilt(BYTE_LEVEL)
    for text in TEXTS[:-1]:
        assert loaded.encode(text) == original.encode(text)
        assert loaded.decode(loaded.encode(text)) == text
    end = BYTE_LEVEL["tokenizer.ggml.eos_token_id"]
    assert loaded.encode("a<|end|><think>b")[1:3] == [end, end + 1]
    assert loaded.decode([end, end + 1]) == "<think>"  # a user-defined token is not a control token
    assert [loaded.added[i] for i in sorted(loaded.special_ids)] == ["<|endoftext|>", "<|end|>"]
    assert loaded.vocab_size == end + 2  # without tokens that only pad the vocabulary


def test_the_file_selects_how_texts_are_split() -> None:
    digits = BYTE_LEVEL["tokenizer.ggml.tokens"].index("1"), "12345"
    joined = BYTE_LEVEL["tokenizer.ggml.tokens"] + ["12"]
    more = {
        "tokens": joined,
        "token_type": BYTE_LEVEL["tokenizer.ggml.token_type"] + [1],
        "merges": BYTE_LEVEL["tokenizer.ggml.merges"] + ["1 2"],
    }
    assert rebuilt(BYTE_LEVEL, pre="gpt-2", **more).encode(digits[1])[0] == len(joined) - 1
    assert rebuilt(BYTE_LEVEL, pre="smollm", **more).encode(digits[1])[0] == digits[0]
    words = BYTE_LEVEL["tokenizer.ggml.tokens"] + ["zq"]  # a token that no merge produces
    more = {"tokens": words, "token_type": BYTE_LEVEL["tokenizer.ggml.token_type"] + [1]}
    assert rebuilt(BYTE_LEVEL, pre="llama-bpe", add_bos_token=False, **more).encode("zq") == [
        len(words) - 1
    ]
    assert len(rebuilt(BYTE_LEVEL, pre="qwen2", **more).encode("zq")) == 2


def test_sentence_piece() -> None:
    tokenizer = rebuilt(SENTENCE_PIECE)
    ids = {text: i for i, text in enumerate(SENTENCE_PIECE["tokenizer.ggml.tokens"])}
    pieces = [1, *(ids[each] for each in ("▁", "hel", "lo"))]
    assert tokenizer.encode("hello") == pieces
    assert tokenizer.decode(pieces) == "hello"
    other = rebuilt(SENTENCE_PIECE, add_space_prefix=False, add_bos_token=False)
    assert other.encode("hello") == pieces[2:]
    eszett = [ids["<0xC3>"], ids["<0x9F>"]]
    assert tokenizer.encode("ß")[-2:] == eszett and tokenizer.decode(tokenizer.encode("ß")) == "ß"
    listed = {"merges": ["e l", "l o", "h el"], "scores": None, "add_space_prefix": False}
    gemma4 = rebuilt(SENTENCE_PIECE, model="gemma4", **listed)
    assert gemma4.encode("hello ß")[:-3] == [ids["hel"], ids["lo"]]
    assert gemma4.decode(gemma4.encode("hello ß\n")) == "hello ß\n"
    phi = rebuilt(SENTENCE_PIECE | {"general.name": "Phi-3 mini"})
    assert phi.encode("</s> \no<s> ")[1:] == [2, *(ids[each] for each in ("▁", "o")), 1, *[3] * 2]
    # Text after a control token begins like a separate text.
    assert tokenizer.encode("</s>o", add_special_tokens=False) == [2, ids["▁"], ids["o"]]


@pytest.mark.parametrize(
    ("pre", "add", "begins", "ends"),
    [
        ("gpt-2", {}, False, False),
        ("llama-bpe", {}, True, False),
        ("llama-bpe", {"add_bos_token": False}, False, False),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, True, True),
    ],
)
def test_tokens_around_a_text(pre: str, add: dict[str, bool], begins: bool, ends: bool) -> None:
    tokenizer, end = rebuilt(BYTE_LEVEL, pre=pre, **add), BYTE_LEVEL["tokenizer.ggml.eos_token_id"]
    ids = tokenizer.encode("a b")
    assert (ids[0] == 0, ids[-1] == end) == (begins, ends)
    assert tokenizer.encode("a b", add_special_tokens=False) == ids[begins : len(ids) - ends]


@pytest.mark.parametrize("text", ["$A", "$B", "a:b", "<s>:1", "$", "x y"])
def test_a_control_token_may_have_any_text(text: str) -> None:
    """This includes text with a meaning in the library's templates."""
    tokens = [text if i == 1 else each for i, each in enumerate(PIECES)]
    ids = rebuilt(SENTENCE_PIECE, tokens=tokens + SENTENCE_PIECE["tokenizer.ggml.tokens"][14:])
    assert ids.encode("hello") == [1, 3, 10, 8]


def test_chat_template(tmp_path: Path) -> None:
    text = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    metadata = as_read(SENTENCE_PIECE)
    config = gguf_tokenizer_config(metadata | {"tokenizer.chat_template": text}, "x.gguf")
    template = load_chat_template("x.gguf", config=config)
    assert template is not None
    assert template.render([{"role": "user", "content": "hello"}]) == "<s>hello</s>"
    own = tmp_path / "own.jinja"
    own.write_text("{{ eos_token }}!")
    template = load_chat_template("x.gguf", own, config)
    assert template is not None and template.render([]) == "</s>!"
    assert load_chat_template("x.gguf", config=gguf_tokenizer_config(metadata, "x")) is None
    # A base model of Gemma has tokens of turns, but no template.
    turns = [*PIECES[:3], "<start_of_turn>", "<end_of_turn>", *PIECES[5:]]
    tokens = turns + SENTENCE_PIECE["tokenizer.ggml.tokens"][len(PIECES) :]
    config = gguf_tokenizer_config(metadata | {"tokenizer.ggml.tokens": tokens}, "x.gguf")
    template = load_chat_template("x.gguf", config=config)
    assert template is not None
    assert template.render([{"role": "user", "content": " hello "}]) == (
        "<s><start_of_turn>user\nhello<end_of_turn>\n<start_of_turn>model\n"
    )


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (BYTE_LEVEL, {"model": "t5"}, "ggml.model: 't5' is not supported; supported: gpt2, llama"),
        (SENTENCE_PIECE, {"model": "gemma4"}, "ggml.merges: missing"),
        (BYTE_LEVEL, {"model": None}, "ggml.model: None is not supported"),
        (BYTE_LEVEL, {"pre": "hunyuan-9"}, "ggml.pre: 'hunyuan-9' is not known; known: llama-bpe"),
        (BYTE_LEVEL, {"pre": None}, "ggml.pre: None is not known"),
        (BYTE_LEVEL, {"tokens": None}, "ggml.tokens: missing"),
        (SENTENCE_PIECE, {"tokens": ["a"] * 3, "token_type": None, "scores": [0.0] * 3}, TWICE),
        (BYTE_LEVEL, {"token_type": [1, 3]}, "ggml.token_type: must be an array of 346 n"),
        (BYTE_LEVEL, {"merges": None}, "ggml.merges: missing"),
        (
            BYTE_LEVEL,
            {"merges": ["a b c"]},
            "ggml.merges: entry 0, 'a b c', is not a pair of tokens",
        ),
        (BYTE_LEVEL, {"add_bos_token": 1}, "ggml.add_bos_token: must be true or false, got 1"),
        (
            BYTE_LEVEL,
            {"add_bos_token": True, "bos_token_id": 2**32 - 1},
            "ggml.bos_token_id: must be one of 346 tokens, got 4294967295",
        ),
        (SENTENCE_PIECE, {"scores": None}, "ggml.scores: missing"),
        (SENTENCE_PIECE, {"unknown_token_id": -1}, "ggml.unknown_token_id: must be one of"),
        (
            BYTE_LEVEL,
            {"tokens": ["a" * 4097]},
            "ggml.tokens: one has 4097 characters, at most 4096 are",
        ),
        (
            SENTENCE_PIECE,
            {"tokens": ["a" * i for i in range(4000, 4020)], "token_type": None}
            | {"scores": [0.0] * 20},
            "ggml.tokens: too long to be words",
        ),
        (
            BYTE_LEVEL,
            {"tokens": [*BYTE_LEVEL["tokenizer.ggml.tokens"], *(f"<{i}>" for i in range(60_000))]}
            | {"token_type": [*BYTE_LEVEL["tokenizer.ggml.token_type"], *[3] * 60_000]},
            "ggml.token_type: 60002 of .* are too many or too long",
        ),
    ],
)
def test_errors_name_the_key_that_cannot_be_rebuilt(
    base: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(TokenizerError, match=rf"tokenizer: x\.gguf: tokenizer\.{words}"):
        rebuilt(base, **changes)


VOCABULARIES = Path(os.environ.get("LLAMA_CPP_MODELS", "/nowhere"))


@pytest.mark.skipif(
    not VOCABULARIES.is_dir(), reason="needs LLAMA_CPP_MODELS, the folder models of llama.cpp"
)
@pytest.mark.parametrize(
    "name",
    ["llama-bpe", "llama-spm", "phi-3", "qwen2", "qwen35", "gpt-2", "mpt", "starcoder", "refact"]
    + ["command-r", "deepseek-coder", "falcon", "gemma-4"],
)
def test_texts_are_encoded_as_llama_cpp_does(name: str) -> None:
    """The cases are llama.cpp's own: digits, spaces, scripts, emoji."""
    path = VOCABULARIES / f"ggml-vocab-{name}.gguf"
    tokenizer = gguf_tokenizer(read_gguf(path).metadata, name)
    texts = Path(f"{path}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text().split("\n")
    assert len(texts) > 40 and lines[len(texts) :] in ([], [""])
    for text, line in zip(texts, lines, strict=False):
        if name != "qwen35" or is_normalized("NFC", text):  # llama.cpp does not compose characters
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert ids == [*map(int, line.split())], text


# Pieces of texts: code, scripts, emoji, combining marks, runs of spaces, special tokens.
SAMPLES = (
    "  ·    ·\n\n·\r\n· \n ·\u3000·\u00a0·\u2028·\u200d·\u0300·\x00·\x7f·\ufeff·e\u0301·\u212b"
    "·o\u0308\u0323·Hello· world·don't· I'LL·’s· the·naïve·½·²·١٢٣·12· 345·6789·3.14·1,000,000·ﬁ·ß"
    "·İ·ǅ·ʰ·—·a.b/c?d·f(x):\n    return x**2\n·for (int i=0;i<10;++i) {·HTTPServer·</b>·#if <a>\r\n"
    "·日本語·中文，测试。·한국어 ·ไทย·हिन्दी·العَرَبِيَّة·Ελληνικά·Русский·ツ·😀"
    "·👩\u200d👩\u200d👧·🇩🇪·👍🏽·𝒳"
)
PARTS = [*"aZ9 \n\t_-.,:;!?'\"()[]{}<>/\\|@#$%^&*+=~`", *SAMPLES.split("·")]
MARKS = ["<|end|>", "<think>"]  # a control token, and one that is not


def _drawn() -> list[str]:
    draw = random.Random(0)
    parts = PARTS + MARKS
    return [
        "".join(draw.choice(parts) + " " * (draw.random() < 0.3) for _ in range(draw.randint(1, 9)))
        for _ in range(1000)
    ]


@lru_cache
def trained(byte_level: bool) -> tuple[list[str], list[str]]:
    """Return tokens and merges. Merges cross all limits of words, or all of lines, so that a split
    that differs gives other ids."""
    raw = Tokenizer(models.BPE())
    alphabet, more = pre_tokenizers.ByteLevel.alphabet(), ["<s>", *MARKS]
    if byte_level:
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        raw.normalizer = normalizers.Replace(" ", "▁")
        raw.pre_tokenizer = pre_tokenizers.Split("\n", behavior="isolated")
        alphabet, more = [], ["<unk>", *more, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=2500,
        special_tokens=more,
        initial_alphabet=alphabet,
        limit_alphabet=256 if byte_level else 90,
        show_progress=False,
    )
    raw.train_from_iterator(_drawn(), trainer)
    model = json.loads(raw.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [" ".join(m) for m in model["merges"]]


@pytest.mark.parametrize(
    ("architecture", "model", "pre"),
    [("gpt2", "gpt2", "gpt-2"), ("llama", "gpt2", "llama-bpe"), ("mistral3", "gpt2", "tekken")]
    + [("gpt-oss", "gpt2", "gpt-4o"), ("qwen2", "gpt2", "qwen2"), ("qwen35", "gpt2", "qwen35")]
    + [("command-r", "gpt2", "command-r"), ("starcoder2", "gpt2", "starcoder")]
    + [("phi3", "llama", "default"), ("gemma3", "llama", "default"), ("gemma4", "gemma4", None)],
)
def test_texts_are_encoded_as_transformers_does(
    architecture: str, model: str, pre: str | None
) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    from transformers.integrations.gguf import gguf_tokenizer_mapping as reader

    byte_level = model == "gpt2"
    tokens, merges = trained(byte_level)
    kinds = {"<unk>": 2, "<s>": 3, MARKS[0]: 3, MARKS[1]: 4}
    values: dict[str, Any] = {"model": model, "pre": pre, "tokens": tokens, "add_bos_token": False}
    values["token_type"] = [kinds.get(t, 6 if t.startswith("<0x") else 1) for t in tokens]
    if model == "llama":
        values |= {"scores": [-float(i) for i in range(len(tokens))]}
        values["add_space_prefix"] = architecture == "phi3"
    else:
        values |= {"merges": merges, "add_space_prefix": False}
    tokenizer = gguf_tokenizer(as_read({f"tokenizer.ggml.{k}": v for k, v in values.items()}), "x")
    names = reader.GGUF_TOKENIZER_MAPPING["tokenizer"]
    read = {names.get(f"ggml.{key}"): value for key, value in values.items()}
    own = {"qwen2": "Qwen2Tokenizer", "qwen35": "Qwen3_5Tokenizer"}
    own |= {"command-r": "CohereTokenizer", "starcoder2": "CohereTokenizer"}
    if architecture in own:
        vocab = {token: i for i, token in enumerate(tokens)}
        made = getattr(transformers, own[architecture])(
            vocab=vocab, merges=[tuple(m.split()) for m in merges]
        )
        reference = reader.add_gguf_special_tokens(made, read).backend_tokenizer
        if architecture == "starcoder2":  # the same without composition
            reference.normalizer = None
    else:
        reference, _ = reader.convert_gguf_tokenizer(architecture, read)
        reference.model.ignore_merges = pre in ("llama-bpe", "tekken")
    for text in _drawn():
        expected = reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text
