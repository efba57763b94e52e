"""Preparation of GBNF, llama.cpp's grammar language, for llguidance's conversion to Lark.

The conversion drops the leading zeros of `\\u` and `\\U`. It also copies classes into regular
expressions, where `&&` and `--` are operators, and where `.` excludes line breaks.
"""

from __future__ import annotations

import json
import re

_PARTS = re.compile(r'"(?:\\.|[^"\\])*"|\[\^?|\.|#[^\n]*', re.DOTALL)
_HEX = "[0-9a-fA-F]"
_CHARACTER = (
    rf"\\u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}"  # two halves of one character
    rf"|\\x{_HEX}{{2}}|\\u{_HEX}{{4}}|\\U{_HEX}{{8}}|\\.|[^\\]"
)
_IN_STRING = re.compile(_CHARACTER, re.DOTALL)
_IN_CLASS = re.compile(rf"(?!\])({_CHARACTER})(?:-(?!\])({_CHARACTER}))?", re.DOTALL)
_ANY = "[\\x00-\U0010ffff]"


def prepared(grammar: str) -> str:
    """Return GBNF with the characters that its escapes stand for. Raises ValueError."""
    parts, at = list[str](), 0
    while (match := _PARTS.search(grammar, at)) is not None:
        parts.append(grammar[at : match.start()])
        at = match.end()
        if match[0] == ".":
            parts.append(_ANY)
        elif match[0].startswith("["):
            parts.append(match[0])
            while (item := _IN_CLASS.match(grammar, at)) is not None:
                ends = [_written(end, special="[]^&~-/") for end in item.groups() if end]
                parts.append("-".join(ends))
                at = item.end()
        elif match[0].startswith('"'):
            text = _IN_STRING.sub(lambda character: _written(character[0]), match[0][1:-1])
            parts.append(f'"{text}"')
    text = "".join([*parts, grammar[at:]])
    text.encode()  # half a character cannot be matched
    return text


def _written(written: str, special: str = "") -> str:
    """Return a character as both Lark and regular expressions read it."""
    if written[:2] in (r"\x", r"\U") and len(written) > 2:
        character = chr(int(written[2:], 16))
    elif written[0] == "\\" and written[1] in 'unrt"\\':
        character = json.loads(f'"{written}"')
    elif written in (r"\[", r"\]"):
        character = written[1]
    elif written[0] == "\\":
        return written  # unknown: the conversion names it
    else:
        character = written
    plain = character >= " " and character not in '"\\\x7f' + special
    return character if plain else f"\\x{ord(character):02x}"
