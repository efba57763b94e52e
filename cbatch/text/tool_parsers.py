"""The formats in which models write thoughts and tool calls, as data for `ReplyReader`."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Literal

from cbatch.core.request.errors import FieldError
from cbatch.text import TextTokenizer
from cbatch.text.forced_tools import Tool, ToolChoice
from cbatch.text.reply_reader import (
    ReplyFormat,
    ThoughtFormat,
    ToolCallFormat,
)
from cbatch.text.written_calls import read_gemma4, read_pairs

# fmt: off
ToolParser = Literal["hermes", "llama3_json", "mistral", "granite", "phi4_mini_json", "harmony",
                     "qwen3_coder", "seed_oss", "glm45", "gemma4"]
# fmt: on
ToolParserSetting = Literal["auto", ToolParser, "none"]
ReasoningParser = Literal[
    "auto", "deepseek_r1", "qwen3", "mistral", "gemma4", "seed_oss", "harmony", "none"
]

_CHANNEL, _MESSAGE, _ASSISTANT = "<|channel|>", "<|message|>", "<|start|>assistant"
THOUGHTS: dict[str, ThoughtFormat] = {
    "deepseek_r1": ThoughtFormat("<think>", "</think>", starts_inside=True),
    "qwen3": ThoughtFormat("<think>", "</think>"),
    "mistral": ThoughtFormat("[THINK]", "[/THINK]"),
    "gemma4": ThoughtFormat("<|channel>thought\n", "<channel|>"),
    "seed_oss": ThoughtFormat("<seed:think>", "</seed:think>"),
    "harmony": ThoughtFormat(
        f"{_CHANNEL}analysis{_MESSAGE}",
        "<|end|>",
        anywhere=True,
        dropped_marks=(
            _ASSISTANT,
            *("<|end|>", "<|return|>", "<|call|>"),
            f"{_CHANNEL}commentary{_MESSAGE}",
            *(f"{_CHANNEL}final{kind}{_MESSAGE}" for kind in ("", " json", " <|constrain|>json")),
        ),
        prompt_end=_ASSISTANT,
        answer_mark=f"{_CHANNEL}final{_MESSAGE}",
    ),
}
_QWEN3_CODER = ToolCallFormat(
    ("<tool_call>",),
    THOUGHTS["qwen3"],
    "<function=",
    end="</tool_call>",
    read=partial(
        read_pairs,
        r"\s*<function=([\w.-]+)>(.*?)\s*(?:</function>\s*)?",
        r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)",
    ),
)
CALLS: dict[ToolParser, ToolCallFormat] = {
    # Hermes, Qwen: <tool_call>{"name": "f", "arguments": {}}</tool_call>, any number of them
    "hermes": ToolCallFormat(
        ("<tool_call>",),
        THOUGHTS["qwen3"],
        end="</tool_call>",
        shapes=("<tool_call>{call}</tool_call>",),
        separator="</tool_call> <tool_call>",
    ),
    # Llama 3: {"name": "f", "parameters": {}}; {...}
    "llama3_json": ToolCallFormat(
        (),
        THOUGHTS["qwen3"],
        next_head=r"[\s;]*",
        shapes=("{call}",),
        separator=";",
        arguments="parameters",
    ),
    # [TOOL_CALLS][{"name": "f", "arguments": {}}, {...}], in newer models [TOOL_CALLS]f[ARGS]{}
    "mistral": ToolCallFormat(
        ("[TOOL_CALLS]",),
        THOUGHTS["mistral"],
        r"\s*(?P<name>[\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*|\s*\[?\s*",
        r"\s*\[?\s*|\s*[\w.-]+[][\w]*\s*",
        next_head=r"\s*,\s*",
        end="]",
        head_tokens=("[CALL_ID]", "[ARGS]"),
        shapes=("[TOOL_CALLS] [{call}]", "[TOOL_CALLS]{name}[ARGS]"),
        separator=",",
    ),
    # Granite 3: <|tool_call|>[{"name": "f", "arguments": {}}, {...}]
    "granite": ToolCallFormat(
        ("<|tool_call|>",),
        THOUGHTS["qwen3"],
        r"\s*\[?\s*",
        r"\s*\[?\s*",
        next_head=r"\s*,\s*",
        end="]",
        shapes=("<|tool_call|> [{call}]",),
        separator=",",
    ),
    # Phi-4-mini: functools[{"name": "f", "arguments": {}}, {...}]
    "phi4_mini_json": ToolCallFormat(
        ("functools",),
        THOUGHTS["qwen3"],
        r"\s*\[\s*",
        r"\s*\[?\s*",
        next_head=r"\s*,\s*",
        end="]",
        shapes=("functools [{call}]",),
        separator=",",
    ),
    # gpt-oss: <|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
    "harmony": ToolCallFormat(
        (
            *(f"{_CHANNEL}{name} to=functions." for name in ("commentary", "analysis")),
            f"{_ASSISTANT} to=functions.",
        ),
        THOUGHTS["harmony"],
        r"(?P<name>[\w.-]+)(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?\w*<\|message\|>\s*",
        r"(?:[\w.-]+[\w\s<|>]*)?",
        end="<|call|>",
        head_tokens=("<|constrain|>", _MESSAGE),
        shapes=(
            f"{_CHANNEL}commentary to=functions.{{name}} <|constrain|>json{_MESSAGE}",
            f" to=functions.{{name}}{_CHANNEL}commentary <|constrain|>json{_MESSAGE}",
        ),
    ),
    # <tool_call><function=f><parameter=key>value</parameter></function></tool_call>
    "qwen3_coder": _QWEN3_CODER,
    "seed_oss": _QWEN3_CODER._replace(
        tags=("<seed:tool_call>",), thoughts=THOUGHTS["seed_oss"], end="</seed:tool_call>"
    ),
    # GLM 4.5: <tool_call>f<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>
    "glm45": ToolCallFormat(
        ("<tool_call>",),
        THOUGHTS["qwen3"],
        "",
        end="</tool_call>",
        read=partial(
            read_pairs,
            r"\s*([\w.-]+)\s*((?:<arg_key>.*)?)",
            r"<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>(.*?)</arg_value>",
        ),
    ),
    # <|tool_call>call:f{key:<|"|>value<|"|>}<tool_call|>
    "gemma4": ToolCallFormat(
        ("<|tool_call>",),
        THOUGHTS["gemma4"],
        "call:",
        end="<tool_call|>",
        head_tokens=('<|"|>',),
        read=read_gemma4,
    ),
}


# Parsers by texts in the chat template. The first DeepSeek-R1's template has no opening mark, and
# the model may write only the closing mark. Other models write both marks, or do not think.
_BY_TEMPLATE: tuple[tuple[ReasoningParser, tuple[str, ...]], ...] = (
    ("harmony", (_CHANNEL,)),
    ("mistral", ("[THINK]",)),
    ("gemma4", ("<|channel>thought",)),
    ("seed_oss", ("<seed:think>",)),
    ("qwen3", ("<think>",)),
    ("deepseek_r1", ("</think>", "<｜Assistant｜>")),
    ("qwen3", ("</think>",)),
)

_NOT_HERMES = ("<function=", "<arg_key>", "<invoke", "<tool_calls>", "<|python_tag|>")
# Likewise for calls: texts that the template has, and texts of other formats that it lacks.
_CALLS_BY_TEMPLATE: tuple[tuple[ToolParser, tuple[str, ...], tuple[str, ...]], ...] = (
    ("harmony", (_CHANNEL,), ()),
    ("mistral", ("[TOOL_CALLS]",), ()),
    ("granite", ("<|tool_call|>", "<|start_of_role|>"), ()),
    ("phi4_mini_json", ("<|tool|>", "<|/tool|>"), ()),
    ("phi4_mini_json", ("functools[",), ()),
    ("gemma4", ("<|tool_call>call:",), ()),
    ("qwen3_coder", ("<tool_call>", "<function="), ("<seed:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>", "<function="), ()),
    ("glm45", ("<tool_call>", "<arg_key>"), ()),
    ("hermes", ("<tool_call>", "arguments"), _NOT_HERMES),
    ("llama3_json", ("<|start_header_id|>", '"parameters": '), ("<function=", "<tool_call>")),
)


def find_tool_parser(setting: ToolParserSetting | None, template: str) -> ToolParser | None:
    """Return the parser of the setting, None for `none`; `auto` chooses by the chat template."""
    if setting != "auto":
        return None if setting == "none" else setting
    for parser, texts, others in _CALLS_BY_TEMPLATE:
        if all(text in template for text in texts) and not any(text in template for text in others):
            return parser
    return None


def find_reasoning_parser(setting: ReasoningParser, template: str) -> ReasoningParser:
    """Return the parser of the setting; `auto` chooses by the chat template."""
    if setting != "auto":
        return setting
    matches = (parser for parser, texts in _BY_TEMPLATE if all(text in template for text in texts))
    return next(matches, "none")


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
