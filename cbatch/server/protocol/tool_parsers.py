"""Tool calls that a model makes of its own accord, in the way that it was trained to write them.

A call is told once it is whole, and what turns out to be none is told as text, so that a stream and
a whole answer say the same. The arguments are JSON as the model wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta, Raw

from cbatch.core.request.errors import FieldError
from cbatch.server.protocol.forced_tools import CallPart, Tool, ToolCallReader, ToolChoice, call_id
from cbatch.text import TextTokenizer

ToolParser = Literal["hermes", "llama3_json"]
MakeReader = Callable[[], ToolCallReader]
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class _Written(msgspec.Struct):
    name: Annotated[str, Meta(min_length=1)]
    arguments: Raw = Raw()
    parameters: Raw = Raw()  # as Llama calls them


_decode = msgspec.json.Decoder(_Written).decode


def require_parser(parser: ToolParser, tokenizer: TextTokenizer | None) -> None:
    """Raises `FieldError` where it would never find a call."""
    if tokenizer is None:
        raise FieldError("tool_parser", "needs a tokenizer", "give one, or leave this out")
    if parser == "hermes" and {_OPEN, _CLOSE} & set(tokenizer.special_tokens):
        problem = f"{_OPEN!r} is a control token of this model and no part of its text"
        raise FieldError("tool_parser", problem, "leave it out")


def free_calls(
    tools: list[Tool], choice: ToolChoice | None, parser: ToolParser | None, *, parallel: bool
) -> MakeReader | None:
    """None: the model does not choose whether it calls. Raises `FieldError`."""
    if not tools or choice not in (None, "auto"):
        return None
    if parser is None:
        raise FieldError(
            "tool_choice",
            "'auto' with `tools` needs to know this model's own way to write calls",
            f"start the server with --tool-parser ({', '.join(get_args(ToolParser))}), use "
            "'required', name a function, or use 'none'",
        )
    return partial(_READERS[parser], parallel=parallel)


class _FreeReader:
    """What the parsers have in common. `_held` is text that may yet become a call."""

    def __init__(self, *, parallel: bool) -> None:
        self._most = None if parallel else 1
        self._num_calls = 0
        self._held = ""

    @property
    def complete(self) -> bool:
        return self._num_calls > 0

    def _call(self, name: str, arguments: str) -> list[CallPart]:
        """Empty for one more than the client takes."""
        if self._num_calls == self._most:
            return []
        self._num_calls += 1
        return [CallPart(self._num_calls - 1, arguments, call_id(), name)]


class TaggedReader(_FreeReader):
    """Hermes, Qwen: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, any number, with
    text around them. White space beside a call is dropped."""

    def __init__(self, *, parallel: bool) -> None:
        super().__init__(parallel=parallel)
        self._before: str | None = None  # in a call: the tag, and the space before it
        self._tried = 0  # in a call: no end of it is before that

    def push(self, text: str) -> list[str | CallPart]:
        self._held += text
        parts: list[str | CallPart] = []
        while self._read_call(parts) if self._before is not None else self._read_text(parts):
            pass
        return parts

    def finish(self) -> list[str | CallPart]:
        """Some models end without the last tag."""
        held, before, self._held = self._held, self._before, ""
        if before is not None:
            found = _written(held)
            return [*self._call(*found)] if found else [before + held]
        return [held] if held and not (self.complete and held.isspace()) else []

    def _read_text(self, parts: list[str | CallPart]) -> bool:
        """Whether a call begins."""
        held, start = self._held, self._held.find(_OPEN)
        opens = start >= 0
        end = len(held[: start if opens else len(held) - _begun(held, _OPEN)].rstrip())
        if end:
            parts.append(held[:end])
        if opens:
            after = start + len(_OPEN)
            self._before, self._held, self._tried = held[end:after], held[after:], 0
        else:
            self._held = held[end:]
        return opens

    def _read_call(self, parts: list[str | CallPart]) -> bool:
        """Whether it ends. A closing tag in a string of its arguments does not end it."""
        while (end := self._held.find(_CLOSE, self._tried)) >= 0:
            found = _written(self._held[:end])
            if found:
                parts += self._call(*found)
                self._before, self._held = None, self._held[end + len(_CLOSE) :]
                return True
            self._tried = end + 1
        return False


class WholeReader(_FreeReader):
    """Llama 3: the reply is `{"name": "f", "parameters": {...}}`, or some of these with semicolons
    between them, or text."""

    def __init__(self, *, parallel: bool) -> None:
        super().__init__(parallel=parallel)
        self._is_text = False

    def push(self, text: str) -> list[str | CallPart]:
        self._held += text
        begun = self._held.lstrip()[:1]
        self._is_text = self._is_text or begun not in ("", "{")
        return self._text() if self._is_text else []

    def finish(self) -> list[str | CallPart]:
        found = [] if self._is_text else _listed(self._held)
        if not found:
            return self._text()
        return [part for name, arguments in found for part in self._call(name, arguments)]

    def _text(self) -> list[str | CallPart]:
        text, self._held = self._held, ""
        return [text] if text else []


_READERS: dict[ToolParser, Callable[..., ToolCallReader]] = {
    "hermes": TaggedReader,
    "llama3_json": WholeReader,
}


def _written(text: str) -> tuple[str, str] | None:
    """A call's name and arguments, if the text is one."""
    try:
        written = _decode(text.encode())
    except (msgspec.DecodeError, RecursionError):
        return None
    arguments = bytes(written.arguments) or bytes(written.parameters)
    return (written.name, arguments.decode()) if arguments.startswith(b"{") else None


def _listed(text: str) -> list[tuple[str, str]]:
    """Empty unless all of it is calls."""
    found: list[tuple[str, str]] = []
    at, decoder = 0, json.JSONDecoder()
    while at < len(text):
        if text[at].isspace() or (text[at] == ";" and found):
            at += 1
            continue
        try:
            _, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        call = _written(text[at:end])
        if call is None:
            return []
        found.append(call)
        at = end
    return found


def _begun(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins the tag, and is not all of it."""
    lengths = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((n for n in lengths if text.endswith(tag[:n])), 0)
