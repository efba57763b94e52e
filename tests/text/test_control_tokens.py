"""Text of messages is never encoded as a control token, with any kind of tokenizer, and stays
unchanged."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from cbatch import FieldError
from cbatch.text import ChatTemplate, TextTokenizer
from cbatch.text.gguf_tokenizer import gguf_tokenizer
from tests.text.test_gguf_tokenizer import BYTE_LEVEL, SENTENCE_PIECE, as_read

SPACE = "▁"
END, TURN = "<s>", "<|turn|>"  # callers and templates write END; only templates write TURN
LETTERS = "abcdeinrstu<>|/'\"{}[]:,.＜＞"
TEMPLATE = ChatTemplate(
    "{% for m in messages %}<|turn|>{{ m.role }}: {{ m.content }}<s>{% endfor %}<|turn|>",
    {},
    "here",
)


def pieces(
    normalizer: Any, pre_tokenizer: Any = None, *, normalized: bool = False, **flags: bool
) -> Tokenizer:
    """BPE of characters with some merges, with byte tokens for unknown characters."""
    merges = [("t", "r"), ("u", "e"), ("tr", "ue"), (SPACE, "true"), ("s", ">")]
    names = ["<unk>", END, *(f"<0x{i:02X}>" for i in range(256)), SPACE, *LETTERS]
    names += [a + b for a, b in merges]
    vocab = {name: at for at, name in enumerate(names)}
    raw = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    if normalizer is not None:
        raw.normalizer = normalizer
    if pre_tokenizer is not None:
        raw.pre_tokenizer = pre_tokenizer
    raw.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokens = [AddedToken(t, special=True, normalized=normalized, **flags) for t in (END, TURN)]
    raw.add_special_tokens(tokens)
    raw.add_tokens([AddedToken("<call>", normalized=False)])
    return raw


def byte_pieces(*, add_prefix_space: bool) -> Tokenizer:
    vocab = {c: at for at, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {"s>": 256, "<s>": 257}
    raw = Tokenizer(models.BPE(vocab, [("s", ">"), ("<", "s>")]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (END, TURN)])
    return raw


def unigram(normalizer: Any = None) -> Tokenizer:
    """A Unigram model that encodes a control token's text as the control token."""
    scores = [("<unk>", 0.0), (END, 0.0), *((c, -3.0) for c in SPACE + LETTERS)]
    raw = Tokenizer(models.Unigram(scores, 0))
    if normalizer is not None:
        raw.normalizer = normalizer
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    raw.decoder = decoders.Metaspace(prepend_scheme="first")
    raw.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (END, TURN)])
    return raw


SPACES = normalizers.Replace(" ", SPACE)
PREPEND = normalizers.Sequence([normalizers.Prepend(SPACE), SPACES])


def from_gguf(metadata: dict[str, Any], control: dict[str, str], **changes: Any) -> TextTokenizer:
    tokens = [control.get(text, text) for text in metadata["tokenizer.ggml.tokens"]]
    values = metadata | {"tokenizer.ggml.tokens": tokens}
    values |= {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return gguf_tokenizer(as_read(values), "x.gguf")


KINDS: dict[str, TextTokenizer] = {
    name: raw if isinstance(raw, TextTokenizer) else TextTokenizer(raw, name)
    for name, raw in {
        "space in front": pieces(PREPEND),
        "Metaspace first": pieces(None, pre_tokenizers.Metaspace(prepend_scheme="first")),
        "strips": pieces(SPACES, lstrip=True, rstrip=True),
        "NFKC, normalized": pieces(
            normalizers.Sequence([normalizers.NFKC(), SPACES]), normalized=True
        ),
        "lower case, normalized": pieces(
            normalizers.Sequence([normalizers.Lowercase(), SPACES]), normalized=True
        ),
        "BERT, normalized": pieces(normalizers.BertNormalizer(), normalized=True),
        "byte level, space in front": byte_pieces(add_prefix_space=True),
        "Unigram, NFKC": unigram(normalizers.NFKC()),
        "GGUF, space in front": from_gguf(SENTENCE_PIECE, {"</s>": TURN}),
        "GGUF, byte level": from_gguf(BYTE_LEVEL, {"<|endoftext|>": END, "<|end|>": TURN}),
    }.items()
}
SPELLINGS = [
    END,
    TURN,
    "<S>",
    "＜s＞",
    "<s\u200b>",
    "<\0s>",
    "<<s>>",
    "<s<s>>",
    "\ufdd01\ufdd0",
    "<call>",
]
PARTS = [*SPELLINGS, "a", "true", " ", " true", "<", "s>", "é", "\U0010f000", "\ue000"]
TEXTS = st.lists(st.sampled_from(PARTS), min_size=1, max_size=6).map("".join)
PLAIN = ["a", "true", " ", " true", "<", "s>", "é", "x", "<call>"]
TURNS = "{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}<|turn|>"
OWN = [TURN, END, TURN, END, TURN]  # the template's own tokens, for two messages


def prompt_ids(
    tokenizer: TextTokenizer, *texts: str, template: ChatTemplate = TEMPLATE
) -> list[int]:
    messages = [{"role": "user", "content": text} for text in texts]
    escaped = tokenizer.control_tokens.escape(messages)
    return tokenizer.control_tokens.encode(template.render(escaped))


def controls(tokenizer: TextTokenizer, ids: list[int]) -> list[str]:
    added = {i: token.content for i, token in tokenizer.raw.get_added_tokens_decoder().items()}
    return [added[i] for i in ids if added.get(i) in (END, TURN)]


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=15)
@given(first=TEXTS, second=TEXTS)
def test_only_the_template_writes_control_tokens(name: str, first: str, second: str) -> None:
    tokenizer = KINDS[name]
    ids = prompt_ids(tokenizer, f"{first}{END}", second)
    assert controls(tokenizer, ids) == OWN


@pytest.mark.parametrize("name", KINDS)
def test_without_escaping_messages_write_control_tokens(name: str) -> None:
    """Without escaping, the ids of a message's text contain control tokens."""
    tokenizer = KINDS[name]
    assert controls(tokenizer, tokenizer.encode(f"{END} {END}", add_special_tokens=False))


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=15)
@given(texts=st.lists(st.lists(st.sampled_from(PLAIN), min_size=1).map("".join), max_size=3))
def test_a_conversation_without_control_tokens_is_encoded_as_before(
    name: str, texts: list[str]
) -> None:
    tokenizer = KINDS[name]
    assume(not any(END in text for text in texts))
    text = TEMPLATE.render([{"role": "user", "content": text} for text in texts])
    assert tokenizer.control_tokens.encode(text) == tokenizer.encode(text, add_special_tokens=False)


# Models that encode the text as a control token: they get its single characters.
MODELS_MAKE_THEM = ["byte level, space in front", "Unigram, NFKC"]
SAME_PIECES = [n for n in KINDS if n not in MODELS_MAKE_THEM and "normalized" not in n]


@lru_cache
def without_control_token(name: str) -> TextTokenizer:
    stored = json.loads(KINDS[name].raw.to_str())
    stored["added_tokens"] = [each for each in stored["added_tokens"] if each["content"] != END]
    return TextTokenizer(Tokenizer.from_str(json.dumps(stored)), "without")


@pytest.mark.parametrize("name", SAME_PIECES)
@settings(max_examples=15)
@given(texts=st.lists(TEXTS, min_size=1, max_size=2))
def test_escaped_text_is_split_as_without_the_control_token(name: str, texts: list[str]) -> None:
    """The number of spaces and the pieces next to the text are the same."""
    tokenizer = KINDS[name]
    without = without_control_token(name)
    assume(not any(other in text for text in texts for other in (TURN, "\ufdd0", "\U0010f000")))
    template = ChatTemplate(TURNS, {}, "here")
    text = template.render([{"role": "user", "content": text} for text in texts])
    expected = [
        tokenizer.raw.token_to_id(without.raw.id_to_token(i))
        for i in without.encode(text, add_special_tokens=False)
    ]
    assert prompt_ids(tokenizer, *texts, template=template) == expected


@pytest.mark.parametrize("name", MODELS_MAKE_THEM)
def test_control_tokens_made_by_the_model_are_spelled_out(name: str) -> None:
    tokenizer = KINDS[name]
    ids = prompt_ids(tokenizer, f"a{END}b")
    written = tokenizer.decode(ids, skip_special_tokens=False)
    assert written.replace(" ", "") == f"{TURN}user:a{END}b{END}{TURN}"


def test_escaping_of_nested_values() -> None:
    tokenizer = KINDS["byte level, space in front"]
    value = {"a": [1, None, True, {END: f"x{END}"}], "b": "plain"}
    escaped = tokenizer.control_tokens.escape(value)
    assert END not in str(escaped) and escaped["a"][:3] == [1, None, True]
    for form in ("{{ messages[0].content }}", "{{ messages[0] | tojson }}"):
        template = ChatTemplate(form, {}, "here")
        text = template.render([{"role": "user", "content": escaped}])
        assert tokenizer.decode(tokenizer.control_tokens.encode(text)).count(f"x{END}") == 1
    ascii_only = ChatTemplate(
        "{{ messages[0] | tojson(ensure_ascii=true) }}{{ '<s>' }}", {}, "here"
    )
    ids = tokenizer.control_tokens.encode(ascii_only.render([{"role": "user", "content": escaped}]))
    assert controls(tokenizer, ids) == [END]
    assert tokenizer.decode(ids).count(f"x{END}") == 1


def test_tokens_added_by_the_tokenizer_are_allowed() -> None:
    raw = pieces(PREPEND)
    raw.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, raw.token_to_id(END))]
    )
    tokenizer = TextTokenizer(raw, "toy")
    for text in ("a", f"a{END}"):
        (escaped,) = tokenizer.control_tokens.escape([text])
        ids = tokenizer.control_tokens.encode(escaped, add_special_tokens=True)
        assert controls(tokenizer, ids) == [END] and ids[0] == raw.token_to_id(END)


def test_a_control_token_of_one_character_without_other_pieces_is_rejected() -> None:
    tokenizer = from_gguf(SENTENCE_PIECE, {"</s>": "$"})
    (escaped,) = tokenizer.control_tokens.escape(["costs $5"])
    with pytest.raises(
        FieldError, match=r"messages: holds '\$', which this tokenizer knows only as a con"
    ):
        tokenizer.control_tokens.encode(escaped)
