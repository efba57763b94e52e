"""The formats in which models write thoughts and tool calls, as data for `ReplyReader`."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from cbatch.core.request.errors import FieldError
from cbatch.text import TextTokenizer
from cbatch.text.forced_tools import Tool, ToolChoice
from cbatch.text.reply_formats import ReplyFormat, ThoughtFormat, ToolCallFormat

# fmt: off
ToolParser = Literal["hermes", "llama3_json", "mistral", "granite", "phi4_mini_json", "harmony",
                     "cohere", "qwen3_coder", "seed_oss", "glm45", "gemma4"]
# fmt: on
ToolParserSetting = Literal["auto", ToolParser, "none"]
ReasoningParser = Literal[
    "auto", "deepseek_r1", "qwen3", "mistral", "gemma4", "seed_oss", "harmony", "cohere", "none"
]

_FORMATS: dict[str, dict[Any, Any]]
_FORMATS = msgspec.toml.decode(Path(__file__).with_name("reply_formats.toml").read_bytes())


def _fields(entry: dict[str, Any]) -> dict[str, Any]:
    fields = {key: entry[key] for key in entry.keys() - {"templates", "lacks"}}
    return {key: tuple(each) if isinstance(each, list) else each for key, each in fields.items()}


THOUGHTS = {name: ThoughtFormat(**_fields(each)) for name, each in _FORMATS["thoughts"].items()}
CALLS: dict[ToolParser, ToolCallFormat] = {
    name: ToolCallFormat(**_fields(entry) | {"thoughts": THOUGHTS[entry["thoughts"]]})
    for name, entry in _FORMATS["calls"].items()
}


def _find(kind: str, template: str) -> Any:
    for name, entry in _FORMATS[kind].items():
        fits = any(all(text in template for text in row) for row in entry["templates"])
        if fits and not any(text in template for text in entry.get("lacks", ())):
            return name
    return None


def find_tool_parser(setting: ToolParserSetting | None, template: str) -> ToolParser | None:
    """Return the parser of the setting, None for `none`; `auto` chooses by the chat template."""
    if setting == "auto":
        return _find("calls", template)  # type: ignore[no-any-return]
    return None if setting == "none" else setting


def find_reasoning_parser(setting: ReasoningParser, template: str) -> ReasoningParser:
    """Return the parser of the setting; `auto` chooses by the chat template."""
    return setting if setting != "auto" else _find("thoughts", template) or "none"


@lru_cache
def mark_ids(form: ReplyFormat, tokenizer: TextTokenizer) -> frozenset[int]:
    ids = tokenizer.special_ids
    return frozenset(i for i in ids if any(tokenizer.added[i] in mark for mark in form.marks))


def call_format(
    parser: ToolParser | None, tools: list[Tool], choice: ToolChoice | None
) -> ToolCallFormat | None:
    """Return the format of calls that the model may choose to make, if any. Raises `FieldError`."""
    if not tools or choice not in (None, "auto"):
        return None
    if parser is None:
        raise FieldError(
            "tool_choice",
            "'auto' with `tools` needs to know the model's format of tool calls",
            f"start the server with --tool-call-parser ({', '.join(CALLS)}), use 'required', name "
            "a function, or use 'none'",
        )
    return CALLS[parser]
