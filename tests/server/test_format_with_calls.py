"""Grammars of replies: an answer in its format, after a thought, or calls in place of it, in every
format of thoughts and calls."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from cbatch import FieldError
from cbatch.core.request.request import SamplingParams, StructuredOutputs
from cbatch.grammars import Grammars
from cbatch.runtime.sampling.structured import Structured
from cbatch.server.protocol.fields import ApiRequest, PendingPrompt
from cbatch.text import TextTokenizer
from cbatch.text.chat_format import surrounding_grammar
from cbatch.text.forced_tools import ToolCallPart
from cbatch.text.reply_reader import ReplyReader
from cbatch.text.tool_parsers import THOUGHTS
from tests.server.apis import CHAT, body_of
from tests.server.parsing import read
from tests.server.scripted import EOS, QWEN, tokenizer_with

PLAIN = tokenizer_with()  # marks are text
MISTRAL = tokenizer_with(special=["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"])
HARMONY = tokenizer_with(
    special=["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"]
)
_matchers: dict[tuple[int, bytes], Any] = {}


def takes(tokenizer: TextTokenizer, outputs: StructuredOutputs | None, text: str) -> bool:
    """Return True if the whole reply may be `text`."""
    key = (id(tokenizer), msgspec.json.encode(outputs))
    if key not in _matchers:
        assert outputs is not None
        grammars = Grammars(lambda: tokenizer, tokenizer.vocab_size, (EOS,))
        _matchers[key] = grammars.matcher(outputs)
    matcher, ids = _matchers[key].deep_copy(), tokenizer.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


# ---- after a thought -----------------------------------------------------------------------------

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
ANSWER, OTHER = '{"a": 1}', '{"b": 1}'
FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"json": SCHEMA}, ANSWER, OTHER),
    ({"regex": "[0-9]{2}"}, "42", "4a"),
    ({"choice": ("yes", "no")}, "yes", "maybe"),
    ({"grammar": 'root ::= "ja" | "nein"'}, "nein", "na"),
]
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
# (format, tokenizer, end of the prompt, allowed beginnings before the answer, forbidden ones)
AFTER_THOUGHTS: list[tuple[str, TextTokenizer, str, list[str], list[str]]] = [
    (
        *("qwen3", QWEN, "[assistant]\n"),
        ["", "<think>Hm</think>", "<think>\n{a <tool_call> 1}\n</think>\n\n", "<think></think>\n"],
        ["Hm</think>", "</think>", "Hm", "<think>Hm", "<think>a</think>\n\n\n", "\n"],
    ),
    (
        *("qwen3", PLAIN, "[assistant]\n"),
        ["", "<think>Hm</thinker></think>", "<think>\n{}\n</think>\n\n"],
        ["Hm</think>", "<think>Hm"],
    ),
    (
        *("deepseek_r1", QWEN, "[assistant]<think>\n"),
        ["Hm</think>", "</think>\n\n", "<think>{}</think>", "a<tool_call>b</tool_call></think>"],
        ["", "Hm", "Hm</think>x"],
    ),
    ("deepseek_r1", QWEN, "[assistant]", ["Hm</think>", "<think>Hm</think>"], [""]),
    ("deepseek_r1", PLAIN, "<think>", ["Hm, </thin </think>"], ["Hm, </think"]),
    ("mistral", MISTRAL, "[/INST]", ["", "[THINK]Hm[/THINK]"], ["Hm", "Hm[/THINK]"]),
    (
        *("harmony", HARMONY, "<|start|>assistant"),
        [FINAL, f"{ANALYSIS}Hm {{}}<|end|><|start|>assistant{FINAL}"],
        ["", ANALYSIS, f"{ANALYSIS}Hm<|end|>", f"{ANALYSIS}Hm<|end|>{FINAL}"],
    ),
]


@pytest.mark.parametrize("case", AFTER_THOUGHTS, ids=lambda case: f"{case[0]} {case[2]!r}")
@pytest.mark.parametrize(("way", "right", "wrong"), FIELDS, ids=lambda fields: str(fields)[:20])
def test_the_answer_follows_its_grammar_after_the_thought(
    case: Any, way: dict[str, Any], right: str, wrong: str
) -> None:
    name, tokenizer, prompt_end, before, never = case
    around = surrounding_grammar(THOUGHTS[name], tokenizer, prompt_end)
    outputs = StructuredOutputs(**way, around=around)
    for text in before:
        assert takes(tokenizer, outputs, text + right), text
        for bad in (text + wrong, text, f"{text}{right}x"):
            assert not takes(tokenizer, outputs, bad), bad
    for text in never:
        assert not takes(tokenizer, outputs, text + right), text


def test_no_control_token_ends_a_thought() -> None:
    around = surrounding_grammar(THOUGHTS["deepseek_r1"], QWEN, "<think>")
    outputs = StructuredOutputs(choice=("yes",), around=around)
    structured = Structured(
        Grammars(lambda: QWEN, QWEN.vocab_size, (EOS,)), outputs, QWEN.vocab_size
    )
    row = torch.zeros(QWEN.vocab_size)
    structured.shape(row)
    forbidden = {i for i in range(QWEN.vocab_size) if row[i] != 0}
    assert forbidden == QWEN.special_ids and EOS in forbidden


@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3", "mistral"])
def test_a_thought_closed_by_the_prompt_needs_no_surrounding_grammar(name: str) -> None:
    thoughts = THOUGHTS[name]
    closed = f"x{thoughts.open_mark}\n\n{thoughts.close_mark}\n\n"
    assert surrounding_grammar(thoughts, QWEN, closed) is None


# ---- or calls ------------------------------------------------------------------------------------

FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
FREE, STRICT = "free", "strict.one"  # names of functions
FUNCTIONS = [{"name": FREE}, {"name": STRICT, "parameters": SCHEMA, "strict": True}]
TOOLS = [{"type": "function", "function": each} for each in FUNCTIONS]
BODY = body_of(CHAT, tools=TOOLS, response_format=FORMAT)
THOUGHT = f"{ANALYSIS}Hm.<|end|><|start|>assistant"
TO = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"
OTHER_ORDER = " to=functions.{}<|channel|>commentary <|constrain|>json<|message|>{}"
HERMES = "<tool_call>\n{{" + '"name": "{}", "arguments": {}' + "}}\n</tool_call>"
OBJECT = "{{" + '"name": "{}", "arguments": {}' + "}}"
COHERE = OBJECT.replace("name", "tool_name").replace("arguments", "parameters")


class Form(msgspec.Struct):
    """A format of calls: `joined` is a text with the calls, each as `call`. `final` begins the
    answer. `prompt` is its end, and `beginnings` those of replies."""

    parser: str
    tokenizer: TextTokenizer
    call: str
    separator: str = ""
    joined: str = "{}"
    final: str = ""
    reasoning: str = "none"
    prompt: str = ""
    beginnings: tuple[str, ...] = ("",)

    def write(self, *calls: tuple[str, str]) -> str:
        return self.joined.format(self.separator.join(self.call.format(*call) for call in calls))


OF_HARMONY: dict[str, Any] = {"final": FINAL, "reasoning": "harmony"}
OF_HARMONY |= {"prompt": "<|start|>assistant", "beginnings": ("", THOUGHT)}
FORMS = {
    "hermes": Form("hermes", QWEN, HERMES, "\n"),
    "hermes, marks are text": Form("hermes", PLAIN, HERMES, "\n"),
    "hermes with thoughts": Form(
        *("hermes", QWEN, HERMES, "\n"), reasoning="qwen3", beginnings=("", "<think>a</think>\n")
    ),
    "hermes in a thought": Form(
        *("hermes", QWEN, HERMES, "\n"),
        reasoning="deepseek_r1",
        prompt="<think>",
        beginnings=("a</think>", "</think>\n\n"),
    ),
    "hermes, closed thought": Form(
        *("hermes", QWEN, HERMES, "\n"), reasoning="qwen3", prompt="<think></think>"
    ),
    "llama3_json": Form("llama3_json", PLAIN, OBJECT.replace("arguments", "parameters"), "; "),
    "mistral": Form("mistral", MISTRAL, OBJECT, ", ", "[TOOL_CALLS] [{}]"),
    "granite": Form("granite", PLAIN, OBJECT, ", ", "<|tool_call|>[{}]"),
    "cohere": Form(
        *("cohere", PLAIN, COHERE, ",", "<|START_ACTION|>[{}]<|END_ACTION|>"),
        final="<|START_RESPONSE|>",
        reasoning="cohere",
        beginnings=("", "<|START_THINKING|>a<|END_THINKING|>"),
    ),
    "phi4_mini_json": Form("phi4_mini_json", PLAIN, OBJECT, ", ", "functools[{}]"),
    "mistral, newer": Form(
        *("mistral", MISTRAL, "[TOOL_CALLS]{}[ARGS]{}"),
        reasoning="mistral",
        beginnings=("", "[THINK]a[/THINK]"),
    ),
    "harmony": Form("harmony", HARMONY, TO, **OF_HARMONY),
    "harmony, other order": Form("harmony", HARMONY, OTHER_ORDER, **OF_HARMONY),
}
EACH_FORM = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def request_of(form: Form, **change: Any) -> tuple[ApiRequest, StructuredOutputs | None]:
    """Return the request, and its grammar after the prompt is known."""
    options: dict[str, Any] = {"tokenizer": form.tokenizer, "tool_parser": form.parser}
    options |= {"vocab_size": form.tokenizer.vocab_size, "max_model_len": 4096}
    options["reasoning_parser"] = form.reasoning
    return constrained(read(CHAT, BODY | change, form.prompt, **options))


def constrained(request: ApiRequest) -> tuple[ApiRequest, StructuredOutputs | None]:
    (pending,) = request.prompts
    assert isinstance(pending, PendingPrompt) and pending.constrain is not None
    params: SamplingParams = pending.constrain(request.params, pending.make())
    return request, params.structured_outputs


@EACH_FORM
def test_the_reply_is_an_answer_in_the_format_or_calls(form: Form) -> None:
    request, outputs = request_of(form)
    assert request.reply is not None
    tokenizer, one, two = form.tokenizer, (FREE, '{"x": [1]}'), (STRICT, '{"a": 2}')
    for before in form.beginnings:
        assert takes(tokenizer, outputs, before + form.final + ANSWER)
        assert not takes(tokenizer, outputs, before + form.final + OTHER)
        for calls in ([one], [two], [one, two])[: 2 if form.parser == "harmony" else 3]:
            text = before + form.write(*calls)
            assert takes(tokenizer, outputs, text), text
            reader = ReplyReader(request.reply, form.prompt)
            parts = [*reader.push(text), *reader.finish()]
            assert [(p.name, p.arguments) for p in parts if isinstance(p, ToolCallPart)] == calls
        for wrong in (("other", "{}"), (STRICT, OTHER), (FREE, "[1]")):
            assert not takes(tokenizer, outputs, before + form.write(wrong))
        assert not takes(tokenizer, outputs, f"{before}I look.{form.write(one)}")
        assert not takes(tokenizer, outputs, before + form.write(one) + ANSWER)
    assert not [name for name in request.ignored if name.endswith("strict")]


@EACH_FORM
def test_tool_choice_and_parallel_calls(form: Form) -> None:
    tokenizer, (before, *_) = form.tokenizer, form.beginnings
    one, two = (FREE, "{}"), (STRICT, '{"a": 2}')
    _, single = request_of(form, parallel_tool_calls=False)
    assert takes(tokenizer, single, before + form.write(one))
    assert not takes(tokenizer, single, before + form.write(one, two))
    _, none = request_of(form, tool_choice="none")
    assert takes(tokenizer, none, before + form.final + ANSWER)
    assert not takes(tokenizer, none, before + form.write(one))
    named = {"type": "function", "function": {"name": STRICT}}
    for choice, forced in (
        ("required", '[{"name": "strict.one", "arguments": {"a": 2}}]'),
        (named, '{"a": 2}'),
    ):
        _, outputs = request_of(form, tool_choice=choice, response_format={"type": "json_object"})
        assert takes(tokenizer, outputs, before + form.final + forced), "forced, as without"
        assert not takes(tokenizer, outputs, before + form.final + OTHER)


WAYS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}}, OTHER, "[1]"),
    ({"structured_outputs": {"regex": "[0-9]+"}}, "42", "4a"),
    ({"guided_choice": ["yes", "no"]}, "no", "maybe"),
    ({"guided_grammar": 'root ::= "ja" | "nein"'}, "nein", "na"),
]


@pytest.mark.parametrize(("way", "right", "wrong"), WAYS, ids=lambda way: str(way)[:20])
def test_every_constraint_leaves_calls_possible(way: Any, right: str, wrong: str) -> None:
    for name in ("hermes with thoughts", "llama3_json", "mistral", "harmony"):
        form = FORMS[name]
        _, outputs = request_of(form, **({"response_format": None} | way))
        for before in form.beginnings:
            assert takes(form.tokenizer, outputs, before + form.final + right)
            assert not takes(form.tokenizer, outputs, before + form.final + wrong)
            assert takes(form.tokenizer, outputs, before + form.write((FREE, "{}")))


def test_an_own_surrounding_grammar_is_kept_and_tools_are_checked() -> None:
    own = {"regex": "[0-9]+", "around": 'start: "=" @answer'}
    form = FORMS["hermes"]
    request, outputs = request_of(form, response_format=None, structured_outputs=own)
    assert takes(QWEN, outputs, "=42") and not takes(QWEN, outputs, form.write((FREE, "{}")))
    assert "tools[1].function.strict" in request.ignored
    with pytest.raises(FieldError, match=r"tools\[1\].function.name: 'free' appears twice"):
        request_of(form, tools=[TOOLS[0], TOOLS[0]])
