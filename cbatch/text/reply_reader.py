"""Incremental parser of a reply: a stream of thoughts, tool calls, text, and its end.

One parser reads all formats; `tool_parsers` defines them as data. The result does not depend on how
the text is split into pieces. Only text whose meaning depends on later text is held back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache, reduce
from itertools import zip_longest
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from cbatch.core.request.request import FinishReason
from cbatch.text.forced_tools import ForcedCallReader, JsonEnd, ToolCallPart, call_id
from cbatch.text.outputs import Output
from cbatch.text.reply_formats import ReplyFormat, ToolCallFormat
from cbatch.text.written_calls import may_begin, read_written

_MAX_HEAD_CHARS = 256  # longest head: the text between a call's tag and its arguments


class Thought(str):
    """A piece of a thought that is returned separately from the answer."""

    __slots__ = ()


class Done(NamedTuple):
    """The end of a reply. The reason is "tool_calls" after complete calls, also forced calls."""

    reason: str


Part = str | Thought | ToolCallPart
ReplyPart = Part | Done


class ReplyReader:
    """Parse the text of one choice. `prompt_end` is the end of the prompt's text."""

    def __init__(self, form: ReplyFormat, prompt_end: str = "") -> None:
        self._calls, self._thoughts, self._separate = form.calls, form.thoughts, form.separate
        self._forced = None if form.forced is None else ForcedCallReader(form.forced.name)
        self._max_calls, self._num_calls = None if form.parallel else 1, 0
        self._names, self._texts, self._cut = form.names, form.texts, False
        self.thought_tokens = 0  # including the marks around thoughts; counted by `read_reply`
        thoughts = form.thoughts
        self.in_thought = thoughts is not None and thoughts.reply_starts_inside(prompt_end)
        self._pending = ""  # text that is not classified yet
        self._parts: list[Part] = []
        self._state: Callable[[bool], bool] = self._read_start
        self._marks: tuple[str, ...] = () if self._calls is None else self._calls.tags
        if thoughts is not None and thoughts.anywhere:
            self._marks += (thoughts.open_mark, *thoughts.dropped_marks)
            if not self.in_thought:
                self._state, self._pending = self._read_text, thoughts.prompt_end
        self._thought_is_empty = True
        # The call being read: text before it, patterns of its head, its object up to `_read_to`.
        self._before = self._head = self._partial_head = ""
        self._object: JsonEnd | None = None
        self._read_to = 0

    @property
    def complete(self) -> bool:
        """True if the reply had calls and the last one is complete."""
        return self._num_calls > 0 if self._forced is None else self._forced.complete

    def push(self, text: str, *, final: bool = False) -> list[Part]:
        self._pending += text
        self._parts = []
        while self._state(final):
            pass
        return self._parts

    def finish(self, *, cut: bool = False) -> list[Part]:
        """Return what was held back, when the reply ends. `cut`: the model did not end it."""
        self._cut = cut
        return self.push("", final=True)

    # Each state returns whether the next state can continue with the pending text.

    def _read_start(self, final: bool) -> bool:
        thoughts, text = self._thoughts, self._pending.lstrip()
        if thoughts is None:
            return self._begin_answer()
        has_mark = text.startswith(thoughts.open_mark)
        if not has_mark and not final and thoughts.open_mark.startswith(text):
            return False
        if has_mark:
            return self._begin_thought(len(self._pending) - len(text) + len(thoughts.open_mark))
        return self._begin_thought(0) if self.in_thought else self._begin_answer()

    def _begin_thought(self, at: int) -> bool:
        """Start a thought whose opening mark ends at index `at` of the pending text."""
        self._emit_thought("", mark=self._pending[:at])
        self._pending = self._pending[at:]
        self.in_thought = self._thought_is_empty = True
        self._state = self._read_thought
        return True

    def _read_thought(self, final: bool) -> bool:
        assert self._thoughts is not None
        pending = self._pending
        stop, end = _find(pending, (self._thoughts.close_mark,), final)
        text = pending if final and end is None else pending[:stop]
        if self._separate and self._thought_is_empty:
            text = text.lstrip()
        shown = text.rstrip() if self._separate else text
        self._thought_is_empty = self._thought_is_empty and not shown
        self._emit_thought(shown)
        self._pending = text[len(shown) :] + pending[stop:]
        if end is None:
            return False
        self._emit_thought("", mark=pending[stop:end])
        self._pending, self.in_thought = pending[end:], False
        self._state = self._skip_space if self._separate else self._begin_answer
        return True

    def _skip_space(self, final: bool) -> bool:
        """Drop white space between a thought and the text after it."""
        self._pending = self._pending.lstrip()
        return bool(self._pending) and self._begin_answer()

    def _begin_answer(self, _: bool = False) -> bool:
        self._state = self._read_text
        if self._calls is not None and not self._calls.tags:
            self._begin_call("", self._calls.head, self._calls.partial_head)
        return True

    def _read_text(self, final: bool) -> bool:
        pending, thoughts = self._pending, self._thoughts
        start, end = _find(pending, self._marks, final)
        if end is None:
            # With `anywhere`, marks are control tokens, and part of a control token is not text.
            shows_all = final and not (thoughts is not None and thoughts.anywhere)
            shown = pending if shows_all else pending[:start]
            if self._marks and not final:  # white space before a mark is dropped
                shown = shown.rstrip()
            self._pending = pending[len(shown) :]
            self._emit("" if final and self.complete and shown.isspace() else shown)
            return False
        shown, mark = pending[:start].rstrip(), pending[start:end]
        self._emit(shown)
        if self._calls is not None and mark in self._calls.tags:
            self._pending = pending[end:]
            self._begin_call(pending[len(shown) : end], self._calls.head, self._calls.partial_head)
        elif thoughts is not None and mark == thoughts.open_mark:
            self._pending = pending[start:]
            self._begin_thought(len(mark))
        else:
            self._pending = pending[end:]
        return True

    def _begin_call(self, before: str, head: str, partial_head: str) -> None:
        self._before, self._head, self._partial_head = before, head, partial_head
        self._object, self._read_to, self._state = None, 0, self._read_call

    def _read_call(self, final: bool) -> bool:
        if self._calls and self._calls.call:
            return self._read_written(self._calls, final)
        pending, head = self._pending, re.match(self._head, self._pending)
        name = None if head is None else head.groupdict().get("name")
        at = 0 if head is None else head.end()
        begins = None if head is None else _OBJECT.match(pending, at)
        if begins is None or not (name or begins[0] == "{"):
            return self._read_no_object(name, at, final)
        if self._object is None:
            self._object, self._read_to = JsonEnd(), at
        end = self._object.push(pending[self._read_to :])
        if end is None:
            self._read_to = len(pending)
            return self._reject_call() if final or self._object.broken else False
        end += self._read_to
        tagged = self._calls is not None and bool(self._calls.tags)
        return self._add_call(_call(pending[at:end], name, tagged=tagged), end)

    def _read_written(self, form: ToolCallFormat, final: bool) -> bool:
        """Read a call that is not JSON. Its end may be absent at the end of the reply."""
        pending = self._pending
        if not may_begin(form.head, form.partial_head, pending[:_MAX_HEAD_CHARS]):
            return self._reject_call()
        end = pending.find(form.end, max(self._read_to - len(form.end), 0))
        self._read_to = len(pending)
        if end < 0 and (self._cut or not final):
            return final and self._reject_call()
        ended, end = end >= 0, len(pending) if end < 0 else end
        call = read_written(form.call, form.pair, pending[:end], self._texts, ended=ended)
        return self._add_call(call, end)

    def _read_no_object(self, name: str | None, at: int, final: bool) -> bool:
        """Read a call whose head ends at index `at` of the pending text, and no object follows."""
        pending, rest = self._pending, self._pending[at:]
        marks = (*self._marks, self._calls.end) if name and self._calls is not None else ()
        null = re.match(r"null(?!\w)", rest)
        if marks and (final or len(rest) > len("null")) and null is not None:
            return self._add_call((str(name), ""), at + len("null"))
        if marks and (rest.startswith(marks) or final and not (rest or self._cut)):
            return self._add_call((str(name), ""), at)
        begun = any(mark.startswith(rest) for mark in marks and (*marks, "null"))
        waits = begun or re.fullmatch(self._partial_head, pending) is not None
        if final or len(pending) > _MAX_HEAD_CHARS or not waits:
            return self._reject_call()
        return False

    def _add_call(self, call: tuple[str, str] | None, end: int) -> bool:
        """Add a call that ends at index `end` of the pending text. None: the text is no call."""
        if call is None:
            return self._reject_call()
        name, arguments = call
        # Without arguments or a tag, an object with an unknown name may be an answer.
        may_be_answer = not (arguments and self._calls is not None and self._calls.tags)
        if may_be_answer and self._names is not None and name not in self._names:
            return self._reject_call()
        if self._num_calls != self._max_calls:  # further calls are dropped
            self._parts.append(ToolCallPart(self._num_calls, arguments or "{}", call_id(), name))
            self._num_calls += 1
        self._pending, self._state = self._pending[end:], self._read_after_call
        return True

    def _reject_call(self) -> bool:
        self._emit(self._before)
        self._state = self._read_text
        return True

    def _read_after_call(self, final: bool) -> bool:
        assert self._calls is not None
        text, end, next_head = self._pending.lstrip(), self._calls.end, self._calls.next_head
        self._state = self._read_text
        if end and text.startswith(end):
            self._pending = text[len(end) :]
        elif end.startswith(text):  # the beginning of the tag, or only white space
            self._pending = "" if final else self._pending
            self._state = self._read_after_call
            return False
        elif next_head is not None:
            self._begin_call("", next_head, next_head)
        return True

    def _emit_thought(self, text: str, mark: str = "") -> None:
        if shown := Thought(text) if self._separate else text + mark:
            self._parts.append(shown)

    def _emit(self, text: str) -> None:
        if text and self._forced is not None:
            self._parts += self._forced.push(text)
        elif text:
            self._parts.append(text)


def read_reply(output: Output, reader: ReplyReader) -> Iterator[tuple[ReplyPart, bool]]:
    """Yield the parts that an output adds to its reply, and whether each is an accepted draft. A
    part that was held back counts with the token that completed it."""
    pieces, done = output.pieces, output.finished
    for at, (piece, _) in enumerate(zip_longest(pieces, output.token_ids, fillvalue="")):
        thinking = reader.in_thought
        for part in reader.push(piece):
            yield part, at < min(output.num_accepted, len(pieces))
        reader.thought_tokens += thinking or reader.in_thought
    for part in reader.push(output.text[sum(map(len, pieces)) :]):
        yield part, False
    if done is not None:
        stopped = done.finish_reason is FinishReason.STOP
        for part in reader.finish(cut=not stopped or done.stop_string is not None):
            yield part, False
        yield Done("tool_calls" if stopped and reader.complete else done.finish_reason.value), False


@lru_cache
def _pattern(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of any mark, or of an incomplete mark at the end of a text."""

    def part(mark: str) -> str:
        last, *before = map(re.escape, reversed(mark))
        return reduce(lambda after, character: rf"{character}(?:{after}|\Z)", before, last)

    return re.compile("|".join(map(part, sorted(marks, key=len, reverse=True))))


def _find(text: str, marks: tuple[str, ...], final: bool) -> tuple[int, int | None]:
    """Return the start and end of the first mark; the longest if several start there. The end is
    None if the mark is incomplete or absent. `final`: no text follows."""
    match = _pattern(marks).search(text) if marks else None
    if match is None:
        return len(text), None
    longer = any(mark != match[0] and mark.startswith(match[0]) for mark in marks)
    open_end = longer and match.end() == len(text) and not final
    return match.start(), None if open_end or match[0] not in marks else match.end()


_OBJECT = re.compile(r'\{|"\s*(?:[{"]|\Z)')  # the beginning of an object, or of one as a text
_ABSENT = ("", "null")  # no arguments
_HEAD_MEMBERS = {"name", "type", "id"}


class _Call(msgspec.Struct):
    name: str = ""
    tool_name: str = ""  # Cohere's
    arguments: Raw = Raw()
    parameters: Raw = Raw()  # Llama's and Cohere's


def _call(text: str, name: str | None, *, tagged: bool) -> tuple[str, str] | None:
    """Return a call's name and its arguments as written, empty if it has none, or None if `text` is
    not a call. Without a tag, an object with other members is an answer."""
    try:
        if name is None:
            call = msgspec.json.decode(text.encode(), type=_Call)
            given = (bytes(call.arguments).decode(), bytes(call.parameters).decode())
            name = call.name or (call.tool_name if tagged else "")
            arguments = next((each for each in given if each not in _ABSENT), "")
            is_call = tagged or any(given) or msgspec.json.decode(text).keys() <= _HEAD_MEMBERS
            if not (name and is_call):
                return None
        else:
            arguments = text
        if arguments.startswith('"'):
            arguments = msgspec.json.decode(arguments.encode(), type=str).strip()
        if arguments in _ABSENT:
            return name, ""
        msgspec.json.decode(arguments.encode(), type=dict[str, Any])
        return name, arguments
    except (msgspec.DecodeError, RecursionError):
        return None
