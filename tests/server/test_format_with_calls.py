"""A format of the answer leaves the model free to call tools, in every format of calls."""

from __future__ import annotations

from typing import Any

import pytest

from cbatch import FieldError
from cbatch.core.request.request import SamplingParams
from cbatch.grammars import Grammars
from cbatch.server.protocol.fields import ApiRequest, PendingPrompt
from cbatch.text import TextTokenizer
from cbatch.text.forced_tools import ToolCallPart
from cbatch.text.reply_reader import ReplyReader
from tests.server.apis import CHAT, MESSAGES, RESPONSES, body_of
from tests.server.parsing import read
from tests.server.scripted import EOS, QWEN, tokenizer_with

PLAIN = tokenizer_with()  # marks are text
MISTRAL = tokenizer_with(special=["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"])
HARMONY = tokenizer_with(
    special=["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"]
)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
ANSWER, OTHER = '{"a": 1}', '{"b": 1}'
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
INNER = {"type": "json_schema", "schema": SCHEMA}
FREE, STRICT = "free", "strict.one"  # names of functions
FUNCTIONS = [{"name": FREE}, {"name": STRICT, "parameters": SCHEMA, "strict": True}]
TOOLS = [{"type": "function", "function": each} for each in FUNCTIONS]
BODY = body_of(CHAT, tools=TOOLS, response_format=FORMAT)


def hermes(*calls: tuple[str, str]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in calls
    )


def llama(*calls: tuple[str, str]) -> str:
    return "; ".join(
        f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in calls
    )


def mistral(*calls: tuple[str, str]) -> str:
    written = ", ".join(
        f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls
    )
    return f"[TOOL_CALLS] [{written}]"


def new_mistral(*calls: tuple[str, str]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)


def harmony(*calls: tuple[str, str]) -> str:
    return "".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"
        for name, arguments in calls
    )


def other_harmony(*calls: tuple[str, str]) -> str:
    return (
        harmony(*calls)
        .replace("<|channel|>commentary to=", " to=")
        .replace(" <|constrain|>json", "<|channel|>commentary <|constrain|>json")
    )


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
# parser, writer of calls, tokenizer, text before the answer, thoughts (parser, end of the prompt
# and beginnings of replies)
Thoughts = tuple[str, str, list[str]]
CASES: dict[str, tuple[str, Any, TextTokenizer, str, Thoughts]] = {
    "hermes": ("hermes", hermes, QWEN, "", ("none", "", [""])),
    "hermes, marks are text": ("hermes", hermes, PLAIN, "", ("none", "", [""])),
    "hermes with thoughts": ("hermes", hermes, QWEN, "", ("qwen3", "", ["", "<think>a</think>\n"])),
    "hermes in a thought": (
        "hermes",
        hermes,
        QWEN,
        "",
        ("deepseek_r1", "<think>", ["a</think>", "</think>\n\n"]),
    ),
    "hermes, closed thought": ("hermes", hermes, QWEN, "", ("qwen3", "<think></think>", [""])),
    "llama3_json": ("llama3_json", llama, PLAIN, "", ("none", "", [""])),
    "mistral": ("mistral", mistral, MISTRAL, "", ("none", "", [""])),
    "mistral, newer": (
        "mistral",
        new_mistral,
        MISTRAL,
        "",
        ("mistral", "", ["", "[THINK]a[/THINK]"]),
    ),
    "harmony": (
        "harmony",
        harmony,
        HARMONY,
        FINAL,
        ("harmony", "<|start|>assistant", ["", ANALYSIS]),
    ),
    "harmony, other order": (
        "harmony",
        other_harmony,
        HARMONY,
        FINAL,
        ("harmony", "<|start|>assistant", ["", ANALYSIS]),
    ),
}


def request_of(case: Any, **change: Any) -> tuple[ApiRequest, SamplingParams]:
    """Return the request, and its parameters after the prompt is known."""
    parser, _, tokenizer, _, (reasoning, prompt, _) = case
    options: Any = {"tokenizer": tokenizer, "tool_parser": parser, "reasoning_parser": reasoning}
    options |= {"vocab_size": tokenizer.vocab_size, "max_model_len": 4096}
    request = read(CHAT, BODY | change, prompt, **options)
    (pending,) = request.prompts
    assert isinstance(pending, PendingPrompt) and pending.constrain is not None
    return request, pending.constrain(request.params, pending.make())


def takes(tokenizer: TextTokenizer, params: SamplingParams, text: str) -> bool:
    """Return True if the whole reply may be `text`."""
    grammars = Grammars(lambda: tokenizer, tokenizer.vocab_size, (EOS,))
    assert params.structured_outputs is not None
    matcher, ids = grammars.matcher(params.structured_outputs), tokenizer.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_reply_is_an_answer_in_the_format_or_calls(case: Any) -> None:
    _, write, tokenizer, mark, (_, prompt, beginnings) = case
    request, params = request_of(case)
    only_one = write in (harmony, other_harmony)
    one, two = (FREE, '{"x": [1]}'), (STRICT, '{"a": 2}')
    for before in beginnings:
        assert takes(tokenizer, params, before + mark + ANSWER)
        assert not takes(tokenizer, params, before + mark + OTHER)
        for calls in ([one], [two], [one, two])[: 2 if only_one else 3]:
            assert takes(tokenizer, params, before + write(*calls)), before + write(*calls)
            assert request.reply is not None
            reader = ReplyReader(request.reply, prompt)
            parts = [*reader.push(before + write(*calls)), *reader.finish()]
            read = [(p.name, p.arguments) for p in parts if isinstance(p, ToolCallPart)]
            assert read == calls
        for wrong in (("other", "{}"), (STRICT, OTHER), (FREE, "[1]")):
            assert not takes(tokenizer, params, before + write(wrong))
        assert not takes(tokenizer, params, f"{before}I look.{write(one)}")
        assert not takes(tokenizer, params, before + write(one) + ANSWER)
    assert not [name for name in request.ignored if name.endswith("strict")]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tool_choice_and_parallel_calls(case: Any) -> None:
    _, write, tokenizer, mark, (_, _, (before, *_)) = case
    one, two = (FREE, "{}"), (STRICT, '{"a": 2}')
    _, single = request_of(case, parallel_tool_calls=False)
    assert takes(tokenizer, single, before + write(one))
    assert not takes(tokenizer, single, before + write(one, two))
    _, none = request_of(case, tool_choice="none")
    assert takes(tokenizer, none, before + mark + ANSWER)
    assert not takes(tokenizer, none, before + write(one))
    named = {"type": "function", "function": {"name": STRICT}}
    for choice, forced in (
        ("required", '[{"name": "strict.one", "arguments": {"a": 2}}]'),
        (named, '{"a": 2}'),
    ):
        _, params = request_of(case, tool_choice=choice, response_format={"type": "json_object"})
        assert takes(tokenizer, params, before + mark + forced), "the call is forced, as without"
        assert not takes(tokenizer, params, before + mark + OTHER)


WAYS: dict[str, tuple[dict[str, Any], str, str]] = {
    "an object": ({"response_format": {"type": "json_object"}}, OTHER, "[1]"),
    "a pattern": ({"structured_outputs": {"regex": "[0-9]+"}}, "42", "4a"),
    "a choice": ({"guided_choice": ["yes", "no"]}, "no", "maybe"),
    "GBNF": ({"guided_grammar": 'root ::= "ja" | "nein"'}, "nein", "na"),
}


@pytest.mark.parametrize(("way", "right", "wrong"), WAYS.values(), ids=WAYS)
def test_every_constraint_leaves_calls_possible(way: Any, right: str, wrong: str) -> None:
    for name in ("hermes with thoughts", "llama3_json", "mistral", "harmony"):
        case = CASES[name]
        _, write, tokenizer, mark, (_, _, beginnings) = case
        _, params = request_of(case, **({"response_format": None} | way))
        for before in beginnings:
            assert takes(tokenizer, params, before + mark + right)
            assert not takes(tokenizer, params, before + mark + wrong)
            assert takes(tokenizer, params, before + write((FREE, "{}")))


def test_an_own_surrounding_grammar_is_kept_and_tools_are_checked() -> None:
    own = {"regex": "[0-9]+", "around": 'start: "=" @answer'}
    case = CASES["hermes"]
    request, params = request_of(case, response_format=None, structured_outputs=own)
    assert takes(case[2], params, "=42") and not takes(case[2], params, hermes((FREE, "{}")))
    assert "tools[1].function.strict" in request.ignored
    with pytest.raises(FieldError, match=r"tools\[1\].function.name: 'free' appears twice"):
        request_of(case, tools=[TOOLS[0], TOOLS[0]])


FORMAT_OF: dict[str, dict[str, Any]] = {
    CHAT: {"tools": TOOLS, "response_format": FORMAT},
    RESPONSES: {
        "tools": [{"type": "function", **each} for each in FUNCTIONS],
        "text": {"format": INNER | {"name": "x"}},
    },
    MESSAGES: {
        "tools": [{"name": each["name"], "input_schema": {"type": "object"}} for each in FUNCTIONS],
        "output_config": {"format": INNER},
    },
}


@pytest.mark.parametrize("path", FORMAT_OF)
def test_in_every_api(path: str) -> None:
    request = read(path, body_of(path) | FORMAT_OF[path], "", tokenizer=QWEN)
    (pending,) = request.prompts
    assert isinstance(pending, PendingPrompt) and pending.constrain is not None
    params = pending.constrain(request.params, pending.make())
    for before in ("", "<think>a</think>\n\n"):
        assert takes(QWEN, params, before + hermes((FREE, "{}")))
        assert takes(QWEN, params, before + ANSWER) and not takes(QWEN, params, before + OTHER)
