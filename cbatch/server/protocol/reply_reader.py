"""Incremental parser of a reply: thought, tool calls and answer.

The formats are data for one reader. Its result does not depend on how the text is cut into pieces,
and it holds back only what later text can still change.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, reduce
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Raw

from cbatch.server.protocol.forced_tools import CallPart, CallReader, ForcedCall, JsonEnd, call_id

_MAX_HEAD_CHARS = 256  # between the tag of a call and its arguments


class Thought(str):
    """A piece of a thought that is kept apart from the answer."""

    __slots__ = ()


Part = str | Thought | CallPart


class ThoughtFormat(NamedTuple):
    """The marks around a thought, which begins a reply or may come `anywhere` in it."""

    opens: str
    closes: str
    begun: bool = False  # replies begin in a thought, unless the prompt closes it
    anywhere: bool = False
    dropped: tuple[str, ...] = ()  # other marks between the parts of a reply
    prompt_end: str = ""  # text of the prompt that belongs to the first mark of a reply
    answer: str = ""  # the mark of the answer, which comes after a thought and `prompt_end`

    def begins(self, prompt: str) -> bool:
        """Return whether the reply to a prompt begins in a thought."""
        text = prompt.rstrip()
        return text.endswith(self.opens) or (self.begun and not text.endswith(self.closes))


class CallFormat(NamedTuple):
    """A call consists of a tag, a head and a JSON object. The object is the call (`name`, and
    `arguments` or `parameters`), or its arguments if the head has a group `name`. In a format
    without tags only a reply that begins with a call has calls."""

    tags: tuple[str, ...]
    thoughts: ThoughtFormat  # of these models, where they are not kept apart
    head: str = r"\s*"  # a regular expression
    begun_head: str = r"\s*"  # one that every beginning of a head matches
    again: str | None = None  # the head of a call that follows another without a tag
    end: str = ""  # a tag that may follow a call
    head_tokens: tuple[str, ...] = ()


class ReplyFormat(NamedTuple):
    """The format of the replies to one call. With `separate` a thought is returned as `Thought`,
    without the white space around it; otherwise it is part of the text. In both cases a call inside
    it is no call. `forced` says which calls the answer is forced to be, in our own format."""

    calls: CallFormat | None = None
    thoughts: ThoughtFormat | None = None
    forced: ForcedCall | None = None
    separate: bool = False
    parallel: bool = True

    @property
    def is_text(self) -> bool:
        """Whether every reply is only text."""
        return self.calls is None and self.forced is None and not self.separate

    @property
    def marks(self) -> list[str]:
        """Every text that marks a part of a reply."""
        calls, thoughts = self.calls, self.thoughts
        marks = [] if calls is None else [*calls.tags, calls.end, *calls.head_tokens]
        return marks + ([thoughts.opens, thoughts.closes, *thoughts.dropped] if thoughts else [])


class ReplyReader:
    """Reads the text of one choice, the reply to a prompt that ends with `prompt_end`."""

    def __init__(self, form: ReplyFormat, prompt_end: str = "") -> None:
        self._calls, self._thoughts, self._separate = form.calls, form.thoughts, form.separate
        self._forced = None if form.forced is None else CallReader(form.forced.name)
        self._max_calls, self._num_calls = None if form.parallel else 1, 0
        self.in_thought = self._thoughts is not None and self._thoughts.begins(prompt_end)
        self._held = ""  # text that is not decided yet
        self._parts: list[Part] = []
        self._state: Callable[[bool], bool] = self._read_start
        self._marks: tuple[str, ...] = () if self._calls is None else self._calls.tags
        if self._thoughts is not None and self._thoughts.anywhere:
            self._state, self._held = self._read_text, self._thoughts.prompt_end
            self._marks += (self._thoughts.opens, *self._thoughts.dropped)
        self._thought_is_empty = True
        # Of the call that is being read: the text before it, its head, its object up to a place.
        self._before = self._head = self._begun_head = ""
        self._object: JsonEnd | None = None
        self._read_to = 0

    @property
    def complete(self) -> bool:
        """Whether calls were read, the last one to its end."""
        return self._num_calls > 0 if self._forced is None else self._forced.complete

    def push(self, text: str, *, final: bool = False) -> list[Part]:
        """Return what `text` adds."""
        self._held += text
        self._parts = []
        while self._state(final):
            pass
        return self._parts

    def finish(self) -> list[Part]:
        """Return what was held back, once no more text can come."""
        return self.push("", final=True)

    # Each state returns whether the next one has to read on.

    def _read_start(self, final: bool) -> bool:
        thoughts, text = self._thoughts, self._held.lstrip()
        if thoughts is None:
            return self._begin_answer()
        opens = text.startswith(thoughts.opens)
        if not opens and not final and thoughts.opens.startswith(text):
            return False
        if opens:
            return self._begin_thought(len(self._held) - len(text) + len(thoughts.opens))
        return self._begin_thought(0) if self.in_thought else self._begin_answer()

    def _begin_thought(self, at: int) -> bool:
        """Begin a thought whose mark ends at `at`."""
        self._emit_thought("", mark=self._held[:at])
        self._held = self._held[at:]
        self.in_thought = self._thought_is_empty = True
        self._state = self._read_thought
        return True

    def _read_thought(self, final: bool) -> bool:
        assert self._thoughts is not None
        held = self._held
        stop, end = _find(held, (self._thoughts.closes,), final)
        text = held if final and end is None else held[:stop]
        if self._separate and self._thought_is_empty:
            text = text.lstrip()
        shown = text.rstrip() if self._separate else text
        self._thought_is_empty = self._thought_is_empty and not shown
        self._emit_thought(shown)
        self._held = text[len(shown) :] + held[stop:]
        if end is None:
            return False
        self._emit_thought("", mark=held[stop:end])
        self._held, self.in_thought = held[end:], False
        self._state = self._read_gap if self._separate else self._begin_answer
        return True

    def _read_gap(self, final: bool) -> bool:
        """Drop white space between a thought and what follows it."""
        self._held = self._held.lstrip()
        return bool(self._held) and self._begin_answer()

    def _begin_answer(self, _: bool = False) -> bool:
        self._state = self._read_text
        if self._calls is not None and not self._calls.tags:
            self._begin_call("", self._calls.head, self._calls.begun_head)
        return True

    def _read_text(self, final: bool) -> bool:
        held, thoughts = self._held, self._thoughts
        start, end = _find(held, self._marks, final)
        if end is None:
            whole = final and not (thoughts is not None and thoughts.anywhere)
            shown = held if whole else held[:start]  # part of a control token is no text
            if self._marks and not final:  # white space before a mark is dropped
                shown = shown.rstrip()
            self._held = held[len(shown) :]
            self._emit("" if final and self.complete and shown.isspace() else shown)
            return False
        shown, mark = held[:start].rstrip(), held[start:end]
        self._emit(shown)
        if self._calls is not None and mark in self._calls.tags:
            self._held = held[end:]
            self._begin_call(held[len(shown) : end], self._calls.head, self._calls.begun_head)
        elif thoughts is not None and mark == thoughts.opens:
            self._held = held[start:]
            self._begin_thought(len(mark))
        else:
            self._held = held[end:]
        return True

    def _begin_call(self, before: str, head: str, begun_head: str) -> None:
        """Begin what may be a call; if it is none, `before` becomes text."""
        self._before, self._head, self._begun_head = before, head, begun_head
        self._object = None
        self._state = self._read_call

    def _read_call(self, final: bool) -> bool:
        held = self._held
        at = held.find("{")
        if at < 0:
            begun = len(held) <= _MAX_HEAD_CHARS and re.fullmatch(self._begun_head, held)
            return self._end_no_call() if final or not begun else False
        head = re.fullmatch(self._head, held[:at])
        if head is None:
            return self._end_no_call()
        if self._object is None:
            self._object, self._read_to = JsonEnd(), at
        end = self._object.push(held[self._read_to :])
        if end is None:
            self._read_to = len(held)
            return self._end_no_call() if final or self._object.broken else False
        end += self._read_to
        call = _call(held[at:end], head.groupdict().get("name"))
        if call is None:
            return self._end_no_call()
        if self._num_calls != self._max_calls:  # the client takes no more
            name, arguments = call
            self._parts.append(CallPart(self._num_calls, arguments, call_id(), name))
            self._num_calls += 1
        self._held, self._state = held[end:], self._read_after_call
        return True

    def _end_no_call(self) -> bool:
        self._emit(self._before)
        self._state = self._read_text
        return True

    def _read_after_call(self, final: bool) -> bool:
        assert self._calls is not None
        text, end, again = self._held.lstrip(), self._calls.end, self._calls.again
        self._state = self._read_text
        if end and text.startswith(end):
            self._held = text[len(end) :]
        elif end.startswith(text):  # the beginning of the tag, or white space
            self._held = "" if final else self._held
            self._state = self._read_after_call
            return False
        elif again is not None:
            self._begin_call("", again, again)
        return True

    def _emit_thought(self, text: str, mark: str = "") -> None:
        shown = Thought(text) if self._separate else text + mark
        if shown:
            self._parts.append(shown)

    def _emit(self, text: str) -> None:
        if text and self._forced is not None:
            self._parts += self._forced.push(text)
        elif text:
            self._parts.append(text)


@lru_cache
def _pattern(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of a mark, or of a part of one at the end of a text."""

    def part(mark: str) -> str:
        last, *before = map(re.escape, reversed(mark))
        return reduce(lambda after, character: rf"{character}(?:{after}|\Z)", before, last)

    return re.compile("|".join(map(part, sorted(marks, key=len, reverse=True))))


def _find(text: str, marks: tuple[str, ...], final: bool) -> tuple[int, int | None]:
    """Return where the first mark begins and ends, the longest of those that begin there. The end
    is None if it is not whole, or there is none; `final` says that no text follows."""
    match = _pattern(marks).search(text) if marks else None
    if match is None:
        return len(text), None
    longer = any(mark != match[0] and mark.startswith(match[0]) for mark in marks)
    open_end = longer and match.end() == len(text) and not final
    return match.start(), None if open_end or match[0] not in marks else match.end()


class _Call(msgspec.Struct):
    name: Annotated[str, Meta(min_length=1)]
    arguments: Raw = Raw()
    parameters: Raw = Raw()  # as Llama calls them


def _call(text: str, name: str | None) -> tuple[str, str] | None:
    """Return the name and the arguments as the model wrote them, None if `text` is no call."""
    try:
        if name is not None:
            msgspec.json.decode(text.encode(), type=dict[str, Any])
            return name, text
        call = msgspec.json.decode(text.encode(), type=_Call)
    except (msgspec.DecodeError, RecursionError):
        return None
    arguments = bytes(call.arguments) or bytes(call.parameters)
    return (call.name, arguments.decode()) if arguments.startswith(b"{") else None
