"""Grammars of structured outputs, compiled over a model's vocabulary by llguidance.

The process that owns the clients compiles one to find out whether it does, the engine to follow it;
limits hold what a hostile one costs in either. Compiled grammars are kept by their text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from cbatch.core.errors import FieldError
from cbatch.core.request import StructuredOutputs
from cbatch.text import TextTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

FIELD = "structured_outputs"
MAX_GRAMMAR_CHARS = 65_536
_KEPT = 16
# Between the parts of JSON: a space, or a line break and an indentation. The library's own default
# has no end, and small models go on with it for ever.
_BLANKS: JsonCompileOptions = {"whitespace_pattern": r"\x20|\r?\n(\x20{0,24}|\t{0,8})"}
_REMEDY = "change the grammar as it says"


class Grammars:
    """`tokenizer` is called when the first grammar is asked for, or by `prepare`."""

    def __init__(
        self, tokenizer: Callable[[], TextTokenizer], vocab_size: int, eos_ids: tuple[int, ...]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size, self.eos_ids = vocab_size, eos_ids
        self._compiled = lru_cache(_KEPT)(self._compile)

    def prepare(self) -> None:
        """Reads the vocabulary, so that nobody has to wait for it later: over a second for 128,000
        tokens."""
        with suppress(FieldError):  # told to those who ask for a grammar
            _ = self._vocabulary

    def check(self, asked: StructuredOutputs, field: str = FIELD) -> None:
        """Raises `FieldError` about `field` for what cannot be honoured. May take a while."""
        try:
            self.matcher(asked)
        except FieldError as error:
            raise FieldError(field, error.problem, error.remedy) from error

    def matcher(self, asked: StructuredOutputs) -> LLMatcher:
        """At its beginning, and the caller's own. Raises `FieldError`."""
        compiled = self._compiled(grammar_text(asked))
        if isinstance(compiled, FieldError):
            raise FieldError(compiled.field, compiled.problem, compiled.remedy)
        return compiled.deep_copy()

    def _compile(self, text: str) -> LLMatcher | FieldError:
        from llguidance import LLMatcher

        try:
            tokenizer = self._vocabulary
        except FieldError as error:
            return error
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=_limits())
        trial = matcher.deep_copy()
        if not trial.is_error():  # some do not reach their limits, or a dead end, before
            _try(trial)
        if trial.is_error():
            return FieldError(FIELD, f"does not compile ({_short(trial.get_error())})", _REMEDY)
        return matcher

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        tokenizer = self._tokenizer()
        ids = tokenizer.raw.get_vocab(True).values()
        size = max(ids, default=0) + 1
        eos_ids = [i for i in self.eos_ids if i < size]
        if not eos_ids:
            raise FieldError(FIELD, "the model names no EOS id to end with", "use another model")
        text, padded = tokenizer.raw.to_str(), max(size, self._vocab_size)
        try:
            return LLTokenizer(text, n_vocab=padded, eos_token=eos_ids)
        except ValueError as error:
            problem = f"the model's tokenizer does not allow it ({_short(str(error))})"
            raise FieldError(FIELD, problem, "use another model") from error


def _try(matcher: LLMatcher) -> None:
    """A token, and what may follow it."""
    bits = int.from_bytes(matcher.compute_bitmask(), "little")
    if bits and not matcher.is_error():
        matcher.try_consume_tokens([(bits & -bits).bit_length() - 1])
        matcher.compute_bitmask()


def _limits() -> LLParserLimits:
    """With these the worst of a set of hostile grammars took 0.1 s to compile and 0.3 s for its
    first mask, on a slow core; a schema of ordinary size takes 1 ms, and 0.1 ms a mask."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=500,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,  # they would repeat the text
    )


def require_grammars(grammars: Grammars | None, field: str = FIELD) -> Grammars:
    """Raises `FieldError` about `field` where there are none."""
    if grammars is None:
        remedy = "leave it out, or start the engine with a tokenizer and on the CPU"
        raise FieldError(field, "is not served here", remedy)
    return grammars


def grammar_text(asked: StructuredOutputs) -> str:
    """As llguidance reads it, and as the compiled one is kept by. Raises `FieldError`."""
    from llguidance import LLMatcher, grammar_from

    try:
        if asked.json is not None:
            schema = asked.json if isinstance(asked.json, str) else _dumps(asked.json)
            _require_size(schema)
            return LLMatcher.grammar_from_json_schema(schema, defaults=_BLANKS)
        if asked.choice is not None:
            return _sized(LLMatcher.grammar_from_lark(_alternatives(asked.choice)))
        if asked.regex is not None:
            return _sized(LLMatcher.grammar_from_regex(asked.regex))
        if asked.grammar is not None:
            _require_size(asked.grammar)
            return grammar_from("grammar", asked.grammar)
    except (ValueError, RecursionError) as error:
        if isinstance(error, FieldError):
            raise
        raise FieldError(FIELD, f"cannot be read ({_short(str(error))})", _REMEDY) from error
    return LLMatcher.grammar_from_json_schema({"type": "object"}, defaults=_BLANKS)


def _dumps(schema: object) -> str:
    return json.dumps(schema, ensure_ascii=False)


def _alternatives(texts: tuple[str, ...]) -> str:
    return "start: " + " | ".join(_dumps(text) for text in texts)


def _sized(text: str) -> str:
    _require_size(text)
    return text


def _require_size(text: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise FieldError(FIELD, f"has {len(text)} characters", f"use <= {MAX_GRAMMAR_CHARS}")


def _short(text: str) -> str:
    line = " ".join(text.replace("<non-verbose/>", "").split())
    return line if len(line) <= 300 else f"{line[:297]}..."
