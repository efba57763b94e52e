"""Text of models and of files on a terminal, which would execute the escape sequences in it."""

from __future__ import annotations

from typing import IO

# Control characters but tab and line break, and characters that reorder or break the line.
_CONTROLS = (
    *(code for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"),
    *(0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x2070)),
)
# Those that JSON leaves as they are become its escapes.
_SHOWN = {code: f"\\x{code:02x}" if code < 0x20 else f"\\u{code:04x}" for code in _CONTROLS}


def escaped(text: str) -> str:
    return text.translate(_SHOWN)


def shown(text: str, stream: IO[str] | IO[bytes]) -> str:
    """Return `text` as it is written to `stream`: escaped for a terminal, else unchanged."""
    return escaped(text) if stream.isatty() else text
