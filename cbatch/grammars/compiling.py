"""Grammars of structured outputs, compiled over a model's vocabulary by llguidance.

Compiling one may take seconds, and some bring the library down: it recurses as deep as they nest.
So a server asks a process of its own first (`guard`), and the engine compiles what has passed in a
thread beside its steps.
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

MAX_GRAMMAR_CHARS = 65_536
MAX_GIVEN_CHARS = 2**20  # with titles, descriptions and other annotations
# Of the thread that compiles: the library takes some 7 KiB for each level that a text nests, and a
# text that is not too long has no more levels than this holds. Only what is touched costs memory.
STACK_BYTES = 256 * 2**20
# What took longer to compile takes more memory, up to 60 MiB a second.
_KEPT_S = 0.2
# Between the parts of JSON: a space, or a line break and an indentation. The library's own default
# has no end, and small models go on with it for ever.
_OPTIONS: JsonCompileOptions = {
    "whitespace_pattern": r"\x20|\r?\n(\x20{0,24}|\t{0,8})",
    "coerce_one_of": True,  # the branches of a rewritten schema have no values in common
    "json_allowed_escapes": 'nrbtf\\"',  # no \u, which can spell a property's name otherwise
}
_REMEDY = "change it there"
_TOO_WIDE = r"\1 optional parts or choices in one place, of which \2 can be followed"
T = TypeVar("T")


class Compiled:
    """A grammar at its beginning. `Grammars` knows it as long as somebody holds it."""

    __slots__ = ("__weakref__", "forbid_repeats", "matcher", "took_s")

    def __init__(
        self, matcher: LLMatcher, took_s: float, forbid_repeats: ForbidRepeats | None
    ) -> None:
        self.matcher, self.took_s, self.forbid_repeats = matcher, took_s, forbid_repeats


class Grammars:
    """`tokenizer` is called when the first grammar is asked for, or by `prepare`. The latest that
    together took no more than `kept_s` are kept, and any that somebody holds. Any thread may
    call."""

    def __init__(
        self,
        tokenizer: Callable[[], TextTokenizer],
        vocab_size: int,
        eos_ids: tuple[int, ...],
        kept_s: float = _KEPT_S,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size, self.eos_ids = vocab_size, eos_ids
        self._known: WeakValueDictionary[StructuredOutputs, Compiled] = WeakValueDictionary()
        self._latest: deque[Compiled] = deque()
        self._kept_s = kept_s
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Reads the vocabulary, so that nobody has to wait for it later: over a second for 128,000
        tokens."""
        with suppress(FieldError):  # told to those who ask for a grammar
            _ = self._vocabulary

    def check(self, asked: StructuredOutputs, field: str = FIELD) -> None:
        """Raises `FieldError` about `field` for what cannot be honoured. May take a while."""
        try:
            self.compiled(asked)
        except FieldError as error:
            raise FieldError(field, error.problem, error.remedy) from error

    def matcher(self, asked: StructuredOutputs) -> LLMatcher:
        """At its beginning, and the caller's own. Raises `FieldError`."""
        return self.compiled(asked).matcher.deep_copy()

    def forbid_repeats(self, asked: StructuredOutputs) -> ForbidRepeats | None:
        """Return `UniqueItems.forbid` for the lists of strings that must be unique, if any."""
        return self.compiled(asked).forbid_repeats

    def plain_token(self, text: bytes) -> int | None:
        """Return the longest token that `text` begins with, added tokens aside, or None."""
        ids = self._vocabulary.greedy_tokenize(text.decode(errors="ignore"))
        return ids[0] if ids else None

    def compiled(self, asked: StructuredOutputs) -> Compiled:
        """Takes time for one that is not known. Raises `FieldError`."""
        with self._lock:
            found = self._known.get(asked)
        if found is None:
            found = with_stack(STACK_BYTES, partial(self._compile, asked))
            _try(found.matcher.deep_copy())
        with self._lock:
            self._known[asked] = found
            with suppress(ValueError):
                self._latest.remove(found)
            self._latest.append(found)
            while sum(each.took_s for each in self._latest) > self._kept_s:
                self._latest.popleft()
        return found

    def _compile(self, asked: StructuredOutputs) -> Compiled:
        from llguidance import LLMatcher

        asked, vocabulary = read(asked), self._vocabulary
        text = grammar_text(asked)
        begin_s = time.thread_time()
        matcher = LLMatcher(vocabulary, text, log_level=0, limits=_limits())
        _require_right(matcher)
        found = re.finditer(f'"{UNIQUE}": ', f"{asked.json} {asked.grammar} {asked.around}")
        decode, words = json.JSONDecoder().raw_decode, range(vocabulary.vocab_size)
        names = [name for each in found for name in decode(each.string, each.end())[0]]
        unique = (
            UniqueItems(names, [vocabulary.decode_bytes([i]) for i in words]) if names else None
        )
        took_s = time.thread_time() - begin_s
        return Compiled(matcher, took_s, None if unique is None else unique.forbid)

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
    """What `work` returns or raises in a thread with a stack of that size."""
    found: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
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
        raise raised.pop()  # held here as well, it would keep all that it saw, up to gigabytes
    return found[0]


_stack_lock = threading.Lock()  # the size is the whole process's


def _require_right(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise FieldError(FIELD, f"does not compile ({_short(matcher.get_error())})", _REMEDY)


def _try(matcher: LLMatcher) -> None:
    """A token, and what may follow it: some do not reach their limits, or a dead end, before."""
    bits = int.from_bytes(matcher.compute_bitmask(), "little")
    if bits and not matcher.is_error():
        matcher.try_consume_tokens([(bits & -bits).bit_length() - 1])
        matcher.compute_bitmask()
    _require_right(matcher)


def _limits() -> LLParserLimits:
    """With these the worst of a set of hostile grammars took 0.1 s to compile and 0.3 s for its
    first mask, on a slow core; a schema of ordinary size takes 1 ms, and 0.1 ms a mask."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,  # they would repeat the text
    )


def not_served(field: str = FIELD) -> FieldError:
    """Where nobody follows grammars."""
    remedy = "leave it out, or start the engine with a tokenizer"
    return FieldError(field, "is not served here", remedy)


def read(asked: StructuredOutputs) -> StructuredOutputs:
    """Return `asked` with GBNF converted to Lark and JSON schemas rewritten for llguidance. A long
    text takes a second of Python, during which other threads wait; to read the result again takes
    no time. Raises `FieldError`."""
    from llguidance.gbnf_to_lark import any_to_lark

    made = asked
    with _reading():
        if asked.json is not None:
            made = replace(
                made, json=_sized(_schema(json.loads(str(asked.json))))
            )  # kept as a text
        if asked.grammar is not None:
            made = replace(made, grammar=_sized(_with_schemas(any_to_lark(asked.grammar))))
        if asked.around is not None:
            made = replace(made, around=_sized(_with_schemas(asked.around)))
    return asked if made == asked else made


def grammar_text(asked: StructuredOutputs) -> str:
    """Return the grammar of what has been `read`, as llguidance takes it. Raises `FieldError`."""
    text = _answer_text(asked)
    if asked.around is None:
        return text
    with _reading():
        answer = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
    whole = {"lark_grammar": asked.around}
    return json.dumps({"grammars": [whole, {**answer, "name": "answer"}]}, ensure_ascii=False)


def _answer_text(asked: StructuredOutputs) -> str:
    from llguidance import LLMatcher

    if asked.choice is not None:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in asked.choice)
        return _sized(LLMatcher.grammar_from_lark(f"start: {texts}"))
    if asked.regex is not None:
        return LLMatcher.grammar_from_regex(_sized(asked.regex))
    if asked.grammar is not None:
        return LLMatcher.grammar_from_lark(asked.grammar)
    return LLMatcher.grammar_from_json_schema(asked.json or _schema({"type": "object"}))


# Parts of a Lark grammar that may hold any text, and `%json`, which a schema follows.
_LARK = re.compile(r'(?:#|//)[^\n]*|"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|<[^<>\s]+>|%json\s*')


def _with_schemas(lark: str) -> str:
    """Return a grammar with its JSON schemas rewritten. Raises `FieldError`, ValueError."""
    parts, at = list[str](), 0
    while (found := _LARK.search(lark, at)) is not None:
        parts.append(lark[at : found.end()])
        at = found.end()
        if found[0].startswith("%"):
            schema, at = json.JSONDecoder().raw_decode(lark, at)
            name = re.search(r"([\w-]+)\s*:\s*%json\s*$", parts[-1])
            parts.append(_schema(schema, name[1] if name else "%json"))
    return "".join([*parts, lark[at:]])


def _schema(schema: Any, name: str = "json") -> str:
    """Return a rewritten JSON schema with our options. Raises `FieldError`, RecursionError."""
    own = schema.get("x-guidance", {}) if isinstance(schema, dict) else {}
    if own.items() >= _OPTIONS.items():  # the result of an earlier call
        return json.dumps(schema, ensure_ascii=False)
    made = {"x-guidance": {**_OPTIONS, **own}, **rewritten(schema, name)}
    return json.dumps(made, ensure_ascii=False)


@contextmanager
def _reading() -> Iterator[None]:
    """Whatever a reader raises is said of the text."""
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
    """Return an error of llguidance in one line, with places in the schema as it was given."""
    text = unquote(text.replace("<non-verbose/>", "")).replace("json-schema:///#/$defs/", "#")
    line = " ".join(text.replace("~1", "/").replace("~0", "~").split())
    line = line.replace("schema too large", "its alternatives have too many combinations")
    line = re.sub(r"Parser Error: .* (\d+) items; max is (\d+);.*", _TOO_WIDE, line)
    return line if len(line) <= 300 else f"{line[:297]}..."
