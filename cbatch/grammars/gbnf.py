"""Preparation of GBNF, llama.cpp's grammar language, for llguidance's conversion to Lark.

The conversion drops the leading zeros of `\\u` and `\\U`. It also copies classes into regular
expressions, where `&&` and `--` are operators, and where `.` excludes line breaks.
"""

from __future__ import annotations

import json
import re

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
