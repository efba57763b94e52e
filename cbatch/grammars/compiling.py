"""Grammars of structured outputs, compiled over a model's vocabulary by llguidance.

Compiling may take seconds, and a deeply nested grammar can overflow the stack of the process. So a
server tries a grammar in a worker process first (`validator`). The engine compiles valid grammars
in a thread while its steps go on.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote
from weakref import WeakValueDictionary

from msgspec.structs import replace

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import StructuredOutputs
from cbatch.grammars.schemas import FIELD, UNIQUE, rewritten
from cbatch.grammars.unique_items import ForbidRepeats, UniqueItems
from cbatch.text import TextTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions


MAX_GRAMMAR_CHARS = 65_536  # of a grammar without its annotations
MAX_GIVEN_CHARS = 2**20  # of a grammar with titles, descriptions and other annotations
# Stack of the compiling thread. The library needs about 7 KiB for each level of nesting, and a text
# of MAX_GRAMMAR_CHARS cannot nest deeper than this stack allows. Untouched pages cost no memory.
STACK_BYTES = 256 * 2**20
# Limit on the total compile time of unused grammars in the cache, in seconds. It bounds their
# memory: compiling allocates up to 240 MiB a second. An ordinary schema compiles in 1 ms.
_KEPT_S = 0.05
# Allowed blanks between the parts of JSON: a space, or a line break and an indentation. The
# library's default has no limit, and small models may emit blanks for ever.
_OPTIONS: JsonCompileOptions = {
    "whitespace_pattern": r"\x20|\r?\n(\x20{0,24}|\t{0,8})",
    "coerce_one_of": True,  # read as `anyOf`: the branches of a rewritten `oneOf` are disjoint
    "json_allowed_escapes": 'nrbtf\\"',  # no \u, which could spell a property's name differently
}
_REMEDY = "change it there"
_TOO_WIDE = r"\1 optional parts or choices in one place, the limit is \2"
T = TypeVar("T")


class Compiled:
    """A compiled grammar in its initial state. `Grammars` caches it while it is in use."""

    __slots__ = ("__weakref__", "compile_s", "forbid_repeats", "matcher")

    def __init__(
        self, matcher: LLMatcher, compile_s: float, forbid_repeats: ForbidRepeats | None
    ) -> None:
        self.matcher, self.compile_s, self.forbid_repeats = matcher, compile_s, forbid_repeats


class Grammars:
    """Compiled grammars of one model. The tokenizer is loaded with the first grammar, or by
    `prepare`. The cache holds grammars that are in use, and recent ones whose compile times add up
    to at most `kept_s`. Methods are thread-safe."""

    def __init__(
        self,
        tokenizer: Callable[[], TextTokenizer],
        vocab_size: int,
        eos_ids: tuple[int, ...],
        kept_s: float = _KEPT_S,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size, self.eos_ids = vocab_size, eos_ids
        self._cache: WeakValueDictionary[StructuredOutputs, Compiled] = WeakValueDictionary()
        self._latest: deque[Compiled] = deque()
        self._kept_s = kept_s
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Load the vocabulary in advance: it takes over a second for 128,000 tokens."""
        with suppress(FieldError):  # raised again for every request with a grammar
            _ = self._vocabulary

    def check(self, spec: StructuredOutputs, field: str = FIELD) -> None:
        """Raise `FieldError` about `field` for an invalid or unsupported grammar. May be slow."""
        try:
            self.compiled(spec)
        except FieldError as error:
            raise FieldError(field, error.problem, error.remedy) from error

    def matcher(self, spec: StructuredOutputs) -> LLMatcher:
        return self.compiled(spec).matcher.deep_copy()

    def forbid_repeats(self, spec: StructuredOutputs) -> ForbidRepeats | None:
        return self.compiled(spec).forbid_repeats

    def plain_token(self, text: bytes) -> int | None:
        """Return the longest token that `text` starts with, or None, ignoring added tokens."""
        ids = self._vocabulary.greedy_tokenize(text.decode(errors="ignore"))
        return ids[0] if ids else None

    def compiled(self, spec: StructuredOutputs) -> Compiled:
        """Return a cached grammar, or compile it, which takes time. Raises `FieldError`."""
        with self._lock:
            grammar = self._cache.get(spec)
        if grammar is None:
            grammar = with_stack(STACK_BYTES, partial(self.compile_spec, spec))
            _test_first_token(grammar.matcher.deep_copy())
        with self._lock:
            self._cache[spec] = grammar
            with suppress(ValueError):
                self._latest.remove(grammar)
            self._latest.append(grammar)
            while sum(recent.compile_s for recent in self._latest) > self._kept_s:
                self._latest.popleft()
        return grammar

    def compile_spec(self, spec: StructuredOutputs) -> Compiled:
        from llguidance import LLMatcher

        spec, vocabulary = read(spec), self._vocabulary
        text = grammar_text(spec)
        start_s = time.thread_time()
        matcher = LLMatcher(vocabulary, text, log_level=0, limits=_limits())
        _require_valid(matcher)
        matches = re.finditer(f'"{UNIQUE}": ', f"{spec.json} {spec.grammar} {spec.around}")
        decode, words = json.JSONDecoder().raw_decode, range(vocabulary.vocab_size)
        names = [name for m in matches for name in decode(m.string, m.end())[0]]
        unique = (
            UniqueItems(names, [vocabulary.decode_bytes([i]) for i in words]) if names else None
        )
        compile_s = time.thread_time() - start_s
        return Compiled(matcher, compile_s, None if unique is None else unique.forbid)

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


def with_stack(size_bytes: int, work: Callable[[], T]) -> T:
    """Run `work` in a thread with this stack size. Return its result, or raise its exception."""
    results: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            raised.append(error)

    with _stack_lock:
        before = threading.stack_size(size_bytes)
        try:
            thread = threading.Thread(target=run, name="cbatch-grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if raised:
        raise raised.pop()  # a reference kept in this list would keep gigabytes alive
    return results[0]


_stack_lock = threading.Lock()  # `threading.stack_size` is set for the whole process


def _require_valid(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise FieldError(FIELD, f"does not compile ({_short(matcher.get_error())})", _REMEDY)


def _test_first_token(matcher: LLMatcher) -> None:
    """Consume a token and compute the next mask: some grammars fail only then."""
    bits = int.from_bytes(matcher.compute_bitmask(), "little")
    if bits and not matcher.is_error():
        matcher.try_consume_tokens([(bits & -bits).bit_length() - 1])
        matcher.compute_bitmask()
    _require_valid(matcher)


def _limits() -> LLParserLimits:
    """Return llguidance's limits. With them the slowest hostile grammar of a test set compiled in
    0.1 s on a slow core, and its first mask took 0.3 s. An ordinary schema compiles in 1 ms, and
    its masks take 0.1 ms each."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,  # verbose errors repeat the grammar's text
    )


def grammars_unsupported(field: str = FIELD) -> FieldError:
    remedy = "leave it out, or start the engine with a tokenizer"
    return FieldError(field, "is not supported here", remedy)


def read(spec: StructuredOutputs) -> StructuredOutputs:
    """Return `spec` with GBNF converted to Lark and JSON schemas rewritten for llguidance. A long
    text may hold the GIL for a second; reading a result of this function again is fast. Raises
    `FieldError`."""
    converted = spec
    with _reading():
        if spec.json is not None:  # a text of JSON
            converted = replace(converted, json=_sized(_schema(json.loads(str(spec.json)))))
        if spec.grammar is not None:
            converted = replace(converted, grammar=_sized(_with_schemas(_lark(spec.grammar))))
        if spec.around is not None:
            converted = replace(converted, around=_sized(_with_schemas(spec.around)))
    return spec if converted == spec else converted


def grammar_text(spec: StructuredOutputs) -> str:
    text = _answer_text(spec)
    if spec.around is None:
        return text
    with _reading():
        answer = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
    whole = {"lark_grammar": spec.around}
    return json.dumps({"grammars": [whole, {**answer, "name": "answer"}]}, ensure_ascii=False)


def _answer_text(spec: StructuredOutputs) -> str:
    from llguidance import LLMatcher

    if spec.choice is not None:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in spec.choice)
        return _sized(LLMatcher.grammar_from_lark(f"start: {texts}"))
    if spec.regex is not None:
        return LLMatcher.grammar_from_regex(_sized(spec.regex))
    if spec.grammar is not None:
        return LLMatcher.grammar_from_lark(spec.grammar)
    return LLMatcher.grammar_from_json_schema(spec.json or _schema({"type": "object"}))


def _lark(grammar: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark, is_lark_syntax

    return grammar if is_lark_syntax(grammar) else any_to_lark(prepared(grammar))


# Comments, strings, regular expressions and special tokens of Lark; `%json`, before a schema.
_LARK = re.compile(r'(?:#|//)[^\n]*|"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|<[^<>\s]+>|%json\s*')


def _with_schemas(lark: str) -> str:
    parts, at = list[str](), 0
    while (match := _LARK.search(lark, at)) is not None:
        parts.append(lark[at : match.end()])
        at = match.end()
        if match[0].startswith("%"):
            schema, at = json.JSONDecoder().raw_decode(lark, at)
            name = re.search(r"([\w-]+)\s*:\s*%json\s*$", parts[-1])
            parts.append(_schema(schema, name[1] if name else "%json"))
    return "".join([*parts, lark[at:]])


def _schema(schema: Any, name: str = "json") -> str:
    own = schema.get("x-guidance", {}) if isinstance(schema, dict) else {}
    if own.items() >= _OPTIONS.items():  # the result of an earlier call
        return json.dumps(schema, ensure_ascii=False)
    options_and_schema = {"x-guidance": {**_OPTIONS, **own}, **rewritten(schema, name)}
    return json.dumps(options_and_schema, ensure_ascii=False)


@contextmanager
def _reading() -> Iterator[None]:
    """Turn any exception of a parser into a `FieldError`."""
    try:
        yield
    except (FieldError, MemoryError):
        raise
    except Exception as error:
        raise FieldError(FIELD, f"cannot be read ({_short(str(error))})", _REMEDY) from error


def _sized(text: str) -> str:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise FieldError(FIELD, f"has {len(text)} characters", f"use <= {MAX_GRAMMAR_CHARS}")
    return text


def _short(text: str) -> str:
    text = unquote(text.replace("<non-verbose/>", "")).replace("json-schema:///#/$defs/", "#")
    line = " ".join(text.replace("~1", "/").replace("~0", "~").split())
    line = line.replace("schema too large", "its alternatives have too many combinations")
    line = re.sub(r"Parser Error: .* (\d+) items; max is (\d+);.*", _TOO_WIDE, line)
    return line if len(line) <= 300 else f"{line[:297]}..."


_PARTS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^]\\])*\]|\.|#[^\n]*', re.DOTALL)
_HEX = "[0-9a-fA-F]"
_CHARACTER = (
    rf"(\\u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}"  # two halves of one character
    rf"|\\x{_HEX}{{2}}|\\u{_HEX}{{4}}|\\U{_HEX}{{8}}|\\.|[^\\])"
)
_IN_STRING = re.compile(_CHARACTER, re.DOTALL)
_IN_CLASS = re.compile(rf"{_CHARACTER}(?:-{_CHARACTER})?", re.DOTALL)
_ESCAPES = dict(zip(r"nrt\"[]", '\n\r\t\\"[]', strict=True))
_ANY = "[\\x00-\U0010ffff]"


def prepared(grammar: str) -> str:
    """Return GBNF with the characters that its escapes mean. Raises ValueError."""
    text = _PARTS.sub(_prepared_part, grammar)
    text.encode()  # half a character cannot be matched
    return text


def _prepared_part(match: re.Match[str]) -> str:
    part = match[0]
    if part[0] == "[":
        start = "[^" if part[1] == "^" else "["
        body = _IN_CLASS.sub(lambda item: _written(*item.groups()), part[len(start) : -1])
        return f"{start}{body}]"
    if part[0] == '"':
        body = _IN_STRING.sub(lambda item: _written(item[0], special=""), part[1:-1])
        return f'"{body}"'
    return _ANY if part == "." else part


def _written(text: str, last: str | None = None, special: str = "[]^&~-/") -> str:
    """Return a character, or a range to `last`, as both Lark and regular expressions read it."""
    if last is not None:
        return f"{_written(text)}-{_written(last)}"
    character = text if len(text) == 1 else _ESCAPES.get(text[1:])
    if len(text) > 2:
        character = json.loads(f'"{text}"') if text[1] == "u" else chr(int(text[2:], 16))
    if character is None:
        return text  # the conversion names the escape
    plain = character >= " " and character not in '"\\\x7f' + special
    return character if plain else f"\\x{ord(character):02x}"
