"""Tokenizers and chat templates rebuilt from the metadata of a GGUF file, by llama.cpp's rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from cbatch.text.tokenizer import TextTokenizer, TokenizerError

_PREFIX, _TEMPLATE = "tokenizer.ggml.", "tokenizer.chat_template"
_SPACE = "\u2581"
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # token types of llama.cpp
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Limit on the sum of squared token lengths: trying all splits of a token costs its length squared.
_MAX_SPLIT_COST = 200_000_000
_MAX_TOKEN_CHARS = 1 << 12
# Limit on the characters of all added tokens: the library searches for them with one automaton.
_MAX_ADDED_CHARS = 1 << 18

# The template of files of Gemma's base models, which have the tokens of turns but no template.
GEMMA_TURNS = """{{ bos_token }}{% for message in messages %}<start_of_turn>{{
'model' if message.role == 'assistant' else 'user' }}
{{ message.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_GPT4O = _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", "{1,3}")
_SEED = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Patterns that split a text, applied in order, by the names in `tokenizer.ggml.pre`.
_SPLIT_PATTERNS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "dbrx"): (
        _WORDS % "{1,3}",
    ),
    ("smaug-bpe", "chatglm-bpe", "glm4"): (_WORDS % "{1,3}",),
    ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "solar-open"): (_WORDS % "",),
    ("qwen35",): (_QWEN35,),
    ("seed-coder",): (_SEED,),
    ("tekken",): (_CASED % ("", "", ""),),
    ("gpt-4o", "llama4", "kanana2", "minimax-m2"): (_GPT4O,),
    ("tiny_aya",): (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"): (
        r"\p{N}",
        _GPT2,
    ),
    ("gpt-2", "mpt", "olmo", "jais", "phi-2", "trillion", "exaone4", "granite-docling"): (_GPT2,),
    ("falcon",): (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    ("deepseek-v3", "hunyuan-dense"): (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK3),
    ("deepseek-coder",): (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
}
_PATTERNS_BY_NAME = {
    name: patterns for names, patterns in _SPLIT_PATTERNS.items() for name in names
}
# Names in `tokenizer.ggml.pre` whose merges do not apply to a word that is itself a token.
_WHOLE_WORDS = frozenset(
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken", "glm4")
)
_ADDS_BOS = _WHOLE_WORDS - {"glm4"}  # names that add BOS unless `add_bos_token` is false
# Names of tokenizers that compose characters first. llama.cpp leaves that out.
_COMPOSE = frozenset(("qwen2", "qwen35", "command-r"))
_KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")  # tokens of Phi-3; others take spaces after them


def gguf_tokenizer(metadata: Mapping[str, Any], source: str) -> TextTokenizer:
    keys = _Keys(metadata, source)
    kind, pre = keys.get("model"), keys.get("pre")
    name = str(metadata.get("general.name")).lower().replace("-", "")
    kept = _KEEP_SPACES if kind == "llama" and "phi3" in name else keys.vocab
    if not isinstance(kind, str) or kind not in _MODELS:
        problem = f"{kind!r:.40} is not supported; supported: {', '.join(_MODELS)}"
        raise keys.error("model", problem)
    try:
        raw = _MODELS[kind](keys)
        for types, special in (((_UNKNOWN, _CONTROL), True), ((_USER_DEFINED,), False)):
            texts = [text for text, i in keys.vocab.items() if keys.types[i] in types]
            if sum(map(len, texts)) > _MAX_ADDED_CHARS:
                raise keys.error("token_type", f"{len(texts)} of {types} are too many or too long")
            options = {"normalized": False, "special": special}
            raw.add_tokens([AddedToken(t, rstrip=t not in kept, **options) for t in texts])
    except TokenizerError:
        raise
    except Exception as error:  # the library raises bare Exception for what it cannot build
        raise TokenizerError(f"tokenizer: {source} cannot be rebuilt ({error})") from error
    ends = {
        "bos": keys.flag("add_bos_token", kind == "llama" or pre in _ADDS_BOS),
        "eos": keys.flag("add_eos_token", False),
    }
    around = {name: keys.special(name) for name, is_added in ends.items() if is_added}
    if around:  # plain names, since "$" and ":" in a token's text would be syntax here
        raw.post_processor = processors.TemplateProcessing(
            single=[part for part in ("bos", "$A", "eos") if part == "$A" or part in around],
            special_tokens=[
                {"id": name, "ids": [keys.vocab[text]], "tokens": [text]}
                for name, text in around.items()
            ],
        )
    return TextTokenizer(raw, source)


def gguf_tokenizer_config(metadata: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the equivalent of `tokenizer_config.json`: special tokens, and chat templates by name.
    Raises `TokenizerError`."""
    keys = _Keys(metadata, source)
    special_tokens = {
        name: keys.special(key)
        for name, key in _SPECIAL.items()
        if keys.get(f"{key}_token_id") is not None
    }
    templates = {
        key.removeprefix(_TEMPLATE).removeprefix(".") or "default": text
        for key, text in metadata.items()
        if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}.")
    }
    if not templates and all(f"<{mark}_of_turn>" in keys.vocab for mark in ("start", "end")):
        templates["default"] = GEMMA_TURNS
    return {**special_tokens, "chat_template": templates}


class _Keys:
    """The tokenizer's part of the metadata. Errors name the file and the key."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self._metadata, self._source = metadata, source

    def error(self, key: str, problem: str) -> TokenizerError:
        return TokenizerError(f"tokenizer: {self._source}: {_PREFIX}{key}: {problem}")

    def get(self, key: str) -> Any:
        return self._metadata.get(_PREFIX + key)

    def strings(self, key: str) -> list[str]:
        strings = self.get(key)
        if not isinstance(strings, list) or not strings:
            raise self.error(key, "missing, or not an array of strings")
        return strings

    def numbers(self, key: str) -> list[Any] | None:
        """Return one number per token, or None if the key is missing."""
        values, expected = self.get(key), len(self.tokens)
        if values is None:
            return None
        if not hasattr(values, "tolist") or len(values) != expected:
            raise self.error(key, f"must be an array of {expected} numbers, one for each token")
        numbers: list[Any] = values.tolist()
        return numbers

    @cached_property
    def tokens(self) -> list[str]:
        texts = self.strings("tokens")
        longest = max(map(len, texts))
        if longest > _MAX_TOKEN_CHARS:
            raise self.error(
                "tokens", f"one has {longest} characters, at most {_MAX_TOKEN_CHARS} are allowed"
            )
        return [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]

    @cached_property
    def types(self) -> list[Any]:
        return self.numbers("token_type") or [0] * len(self.tokens)

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Token ids by text, without unused tokens, which only pad the vocabulary."""
        vocab = {text: i for i, text in enumerate(self.tokens) if self.types[i] != _UNUSED}
        if len(vocab) + self.types.count(_UNUSED) != len(self.tokens):
            raise self.error("tokens", "a token appears twice")
        return vocab

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, f"must be true or false, got {value!r:.40}")
        return default if value is None else value

    def special(self, name: str, default: int | None = None) -> str:
        token_id = self.get(f"{name}_token_id")
        token_id = default if token_id is None else token_id
        if (
            isinstance(token_id, int)
            and 0 <= token_id < len(self.tokens)
            and self.types[token_id] != _UNUSED
        ):
            return self.tokens[token_id]
        problem = f"must be one of {len(self.tokens)} tokens, got {token_id!r:.40}"
        raise self.error(f"{name}_token_id", problem)


def _listed_merges(keys: _Keys) -> list[tuple[str, str]]:
    vocab, merges = keys.vocab, []
    for i, merge in enumerate(keys.strings("merges")):
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise keys.error("merges", f"entry {i}, {merge!r:.80}, is not a pair of tokens")
        merges.append((left, right))
    return merges


def _byte_level(keys: _Keys) -> Tokenizer:
    """Return GPT-2's BPE over bytes. Families differ in how a text is first split into words."""
    pre = keys.get("pre")
    cuts = _PATTERNS_BY_NAME.get(pre) if isinstance(pre, str) else None
    if cuts is None:
        raise keys.error("pre", f"{pre!r:.40} is not known; known: {', '.join(_PATTERNS_BY_NAME)}")
    whole = pre in _WHOLE_WORDS
    model = models.BPE(vocab=keys.vocab, merges=_listed_merges(keys), ignore_merges=whole)
    raw = Tokenizer(model)
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in cuts),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    if pre in _COMPOSE:
        raw.normalizer = normalizers.NFC()
    return raw


def _scored_merges(keys: _Keys) -> list[tuple[str, str]]:
    vocab, scores = keys.vocab, keys.numbers("scores")
    if scores is None:
        raise keys.error("scores", "missing")
    if sum(len(text) ** 2 for text in vocab) > _MAX_SPLIT_COST:
        raise keys.error("tokens", "too long to be words")
    merges = []
    for text, token in vocab.items():
        halves = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        pairs = [(a, b) for a, b in halves if a in vocab and b in vocab]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(-scores[token], pair) for pair in pairs]
    merges.sort(key=lambda merge: merge[0])
    return [pair for _, pair in merges]


def _gemma4(keys: _Keys) -> Tokenizer:
    raw = _sentence_piece(keys, _listed_merges)
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), behavior="isolated")
    return raw


def _sentence_piece(
    keys: _Keys, merges_of: Callable[[_Keys], list[tuple[str, str]]] = _scored_merges
) -> Tokenizer:
    """Return SentencePiece's BPE, which merges the neighbours with the highest score first."""
    raw = Tokenizer(
        models.BPE(
            vocab=keys.vocab,
            merges=merges_of(keys),
            unk_token=keys.special("unknown", 0),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    prefixed = keys.flag("add_space_prefix", True)
    raw.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), spaces] if prefixed else [spaces]
    )
    raw.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(" ", 1, 0)] if prefixed else [])
    )
    return raw


_MODELS: dict[str, Callable[[_Keys], Tokenizer]]
_MODELS = {"gpt2": _byte_level, "llama": _sentence_piece, "gemma4": _gemma4}
