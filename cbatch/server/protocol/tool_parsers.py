"""The formats in which models write thoughts and tool calls, as data for `ReplyReader`."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Literal, NamedTuple

from cbatch.core.request.errors import FieldError
from cbatch.server.protocol.forced_tools import CallReader, ForcedCall, Tool, ToolChoice
from cbatch.server.protocol.reply_reader import CallFormat, ReplyReader, ThoughtFormat
from cbatch.text import TextTokenizer

ToolParser = Literal["hermes", "llama3_json", "mistral", "harmony"]
ReasoningParser = Literal["auto", "deepseek_r1", "qwen3", "mistral", "harmony", "none"]

_CHANNEL, _MESSAGE, _ASSISTANT = "<|channel|>", "<|message|>", "<|start|>assistant"
_NO_HEAD = r"\s*"
THOUGHTS: dict[str, ThoughtFormat] = {
    "deepseek_r1": ThoughtFormat("<think>", "</think>", begun=True),
    "qwen3": ThoughtFormat("<think>", "</think>"),
    "mistral": ThoughtFormat("[THINK]", "[/THINK]"),
    "harmony": ThoughtFormat(
        f"{_CHANNEL}analysis{_MESSAGE}",
        "<|end|>",
        anywhere=True,
        dropped=(
            _ASSISTANT,
            *("<|end|>", "<|return|>", "<|call|>"),
            f"{_CHANNEL}commentary{_MESSAGE}",
            *(f"{_CHANNEL}final{kind}{_MESSAGE}" for kind in ("", " json", " <|constrain|>json")),
        ),
        prompt_end=_ASSISTANT,
        answer=f"{_CHANNEL}final{_MESSAGE}",
    ),
}
CALLS: dict[ToolParser, CallFormat] = {
    # Hermes, Qwen: <tool_call>{"name": "f", "arguments": {}}</tool_call>, any number of them
    "hermes": CallFormat(("<tool_call>",), _NO_HEAD, _NO_HEAD, end="</tool_call>"),
    # Llama 3: {"name": "f", "parameters": {}}; {...}
    "llama3_json": CallFormat((), _NO_HEAD, _NO_HEAD, again=r"[\s;]*"),
    # [TOOL_CALLS][{"name": "f", "arguments": {}}, {...}], in newer models [TOOL_CALLS]f[ARGS]{}
    "mistral": CallFormat(
        ("[TOOL_CALLS]",),
        r"\s*\[?\s*|\s*(?P<name>[\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*",
        r"\s*\[?\s*|\s*[\w.-]+[][\w]*\s*",
        again=r"\s*,\s*",
        end="]",
        head_tokens=("[CALL_ID]", "[ARGS]"),
    ),
    # gpt-oss: <|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
    "harmony": CallFormat(
        (
            *(f"{_CHANNEL}{name} to=functions." for name in ("commentary", "analysis")),
            f"{_ASSISTANT} to=functions.",
        ),
        r"(?P<name>[\w.-]+)(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?\w*<\|message\|>\s*",
        r"(?:[\w.-]+[\w\s<|>]*)?",
        end="<|call|>",
        head_tokens=("<|constrain|>", _MESSAGE),
    ),
}
TaggedReader = partial(ReplyReader, CALLS["hermes"], THOUGHTS["qwen3"])

# By a text in the chat template. Models whose template has no opening mark may only close thoughts.
_BY_TEMPLATE: tuple[tuple[str, ReasoningParser], ...] = (
    (_CHANNEL, "harmony"),
    ("[THINK]", "mistral"),
    ("<think>", "qwen3"),
    ("</think>", "deepseek_r1"),
)


def find_reasoning_parser(asked: ReasoningParser, template: str) -> ReasoningParser:
    """Return the parser that was asked for; `auto` is the one of models with such a template."""
    if asked != "auto":
        return asked
    return next((parser for mark, parser in _BY_TEMPLATE if mark in template), "none")


class ReplyFormat(NamedTuple):
    """The format of the replies to one call. `forced`: the answer is calls in our own format.
    `separate`: thoughts are kept apart from the answer."""

    calls: CallFormat | None
    thoughts: ThoughtFormat | None
    forced: ForcedCall | None = None
    separate: bool = False
    parallel: bool = True

    def reader(self, prompt_end: str) -> ReplyReader:
        """Return a reader for one choice. `prompt_end` includes special tokens."""
        return ReplyReader(
            self.calls,
            self.thoughts,
            parallel=self.parallel,
            separate=self.separate,
            in_thought=self.thoughts is not None and self.thoughts.begins(prompt_end),
            forced=None if self.forced is None else CallReader(self.forced.name),
        )

    def mark_ids(self, tokenizer: TextTokenizer) -> frozenset[int]:
        """Return the special tokens that are part of a mark."""
        return _mark_ids(self.calls, self.thoughts, tokenizer)


@lru_cache
def _mark_ids(
    calls: CallFormat | None, thoughts: ThoughtFormat | None, tokenizer: TextTokenizer
) -> frozenset[int]:
    marks = [mark for each in (calls, thoughts) if each for mark in each.marks]
    ids = tokenizer.special_ids
    return frozenset(i for i in ids if any(tokenizer.added[i] in mark for mark in marks))


def reply_format(
    parser: ToolParser | None,
    reasoning: ReasoningParser,
    tools: list[Tool],
    choice: ToolChoice | None,
    forced: ForcedCall | None,
    *,
    separate: bool,
    parallel: bool,
) -> ReplyFormat | None:
    """Return the format, None if replies are only text. Raises `FieldError`."""
    calls, thoughts = None, THOUGHTS.get(reasoning)
    if tools and choice in (None, "auto"):
        if parser is None and reasoning == "harmony":
            parser = "harmony"
        if parser is None:
            raise FieldError(
                "tool_choice",
                "'auto' with `tools` needs to know this model's own way to write calls",
                f"start the server with --tool-parser ({', '.join(CALLS)}), use 'required', name "
                "a function, or use 'none'",
            )
        calls = CALLS[parser]
        if thoughts is None:  # a call inside a thought is no call, though the thought is text
            thoughts, separate = THOUGHTS[parser if parser in THOUGHTS else "qwen3"], False
    if calls is None and forced is None and not (thoughts and separate):
        return None
    return ReplyFormat(calls, thoughts, forced, separate, parallel)
