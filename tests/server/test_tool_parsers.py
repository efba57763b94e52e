"""Optional tool calls are found in the model's text, however it is split, and sent in the format
that clients expect. The output of the model is scripted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch import FieldError
from cbatch.core.request.request import FinishReason
from cbatch.server.protocol.chats import parse_chat
from cbatch.server.protocol.requests import PendingPrompt
from cbatch.text import ChatTemplate
from cbatch.text.forced_tools import ToolCallPart
from cbatch.text.reply_reader import ReplyFormat, ReplyReader
from cbatch.text.tool_parsers import CALLS, ToolParser, tagged_reader
from tests.server.http_client import CHAT, MODEL, Client, serving_service, toy_model
from tests.server.scripted import ScriptedService
from tests.toy_engine import TOKENIZER

Calls = list[tuple[str, str]]
ROME = '{"city": "Rome", "days": 1.50}'
TRICKY = '{"xml": "<tool_call>{}</tool_call>", "s": "\\"}"}'


def tag(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def quoted(arguments: str) -> str:
    return json.dumps(arguments)


W, N, T = tag("weather", ROME), tag("now", "{}"), tag("write", TRICKY)
WEATHER, NOW, WRITE = ("weather", ROME), ("now", "{}"), ("write", TRICKY)
BAD = '<tool_call>{"name": "f", "arguments": {oops}}</tool_call>'
TAGGED: list[tuple[str, str, Calls]] = [
    ("", "", []),
    ("Plain, with a < b, and <tool", "Plain, with a < b, and <tool", []),
    (" \n", " \n", []),
    ("in\n\ntwo parts \n", "in\n\ntwo parts \n", []),
    (W, "", [WEATHER]),
    (f"\n{W}\n", "", [WEATHER]),
    (f"I look.\n{W}", "I look.", [WEATHER]),
    (f"{W}\n{N}", "", [WEATHER, NOW]),
    (f"{W}{T}{N}", "", [WEATHER, WRITE, NOW]),
    (f"a {W} b {N} c", "a b c", [WEATHER, NOW]),
    (f"<tool_call{W}", "<tool_call", [WEATHER]),
    (f"{W}<tool", "<tool", [WEATHER]),
    (W.removesuffix("</tool_call>"), "", [WEATHER]),
    (W.removesuffix("_call>"), "", [WEATHER]),
    (f"x {W[:-20]}", f"x {W[:-20]}", []),
    (f"{N}\n {BAD}", f"\n {BAD}", [NOW]),
    ('<tool_call>{"arguments": {}, "name": "now"}</tool_call>', "", [NOW]),
    (f"{tag('now', 'null')}\n{tag('now', quoted(''))}", "", [NOW, NOW]),
    (
        f'<tool_call>{{"name": "now"}}</tool_call>\n{tag("weather", quoted(ROME))}',
        "",
        [NOW, WEATHER],
    ),
    (tag("now", "[1]"), tag("now", "[1]"), []),
    (tag("now", quoted("Rome")), tag("now", quoted("Rome")), []),
    (tag("write", quoted(TRICKY)), "", [WRITE]),
]
LLAMA = f'{{"name": "weather", "parameters": {ROME}}}'
WHOLE: list[tuple[str, str, Calls]] = [
    ("", "", []),
    ("Hello {", "Hello {", []),
    (f"\n{LLAMA}", "", [WEATHER]),
    (f'{LLAMA}; {{"name": "now", "arguments": {{}}}} ', "", [WEATHER, NOW]),
    (f"See: {LLAMA}", f"See: {LLAMA}", []),
    (f"{LLAMA} and so on", " and so on", [WEATHER]),
    (LLAMA[:-1], LLAMA[:-1], []),
    ('{"name": "Bob", "age": 7}', '{"name": "Bob", "age": 7}', []),
    ('{"name": "now"}; {"type": "function", "name": "now", "parameters": null}', "", [NOW, NOW]),
    (f'{{"name": "weather", "arguments": {quoted(ROME)}}}', "", [WEATHER]),
    (f'{{"name": "weather", "arguments": null, "parameters": {ROME}}}', "", [WEATHER]),
    ("[" * 9000, "[" * 9000, []),
    ('{"a":' * 9000, '{"a":' * 9000, []),
]


def WholeReader(*, parallel: bool) -> ReplyReader:  # noqa: N802
    return ReplyReader(ReplyFormat(CALLS["llama3_json"], parallel=parallel))


SCRIPTS = [(tagged_reader, *each) for each in TAGGED] + [(WholeReader, *each) for each in WHOLE]


def read(reader: ReplyReader, pieces: list[str]) -> tuple[str, Calls]:
    """Read a text piece by piece, as a stream sends it."""
    parts = [part for piece in pieces for part in reader.push(piece)] + [*reader.finish()]
    calls = [part for part in parts if isinstance(part, ToolCallPart)]
    assert [call.call for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls) and reader.complete == bool(calls)
    assert all(parts), "an empty part"
    read_calls = [(call.name or "", call.arguments) for call in calls]
    return "".join(part for part in parts if isinstance(part, str)), read_calls


def check(kind: Any, text: str, content: str, calls: Calls) -> None:
    cuts, last = [list(text)], len(text)
    if len(text) > 1000:  # many repetitions of a few characters
        cuts, last = [[text], list(text)], 20
    cuts += [[text[:at], text[at:]] for at in range(last + 1)]
    for pieces in cuts:
        assert read(kind(parallel=True), pieces) == (content, calls)
    assert read(kind(parallel=False), [text]) == (content, calls[:1])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: repr(script[1][:30]))
def test_calls_and_text_are_separated_at_every_cut(script: Any) -> None:
    check(*script)


@given(
    st.lists(st.sampled_from([W, N, T, BAD, " ", "\n", "a", "<", "<tool_call>", "</tool_call>"])),
    st.lists(st.integers(0, 400), max_size=8),
)
@settings(max_examples=60, deadline=None)
def test_the_result_does_not_depend_on_the_cuts(texts: list[str], cuts: list[int]) -> None:
    text = "".join(texts)
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in zip(places, places[1:], strict=False)]
    assert read(tagged_reader(parallel=True), pieces) == read(tagged_reader(parallel=True), [text])


def test_text_is_sent_as_it_comes() -> None:
    for reader in (tagged_reader(parallel=True), WholeReader(parallel=True)):
        texts = ["".join(map(str, reader.push(piece))) for piece in ("one", " two", " <", " three")]
        assert texts[:2] == ["one", " two"] and "".join(texts) == "one two < three"


# ---- over the API --------------------------------------------------------------------------------

TOOLS: Any = [{"type": "function", "function": {"name": name}} for name in ("weather", "now")]
BODY: Any = {"messages": [{"role": "user", "content": "Rome?"}], "tools": TOOLS}


@pytest.fixture(scope="module")
def scene() -> Iterator[tuple[Any, Client, openai.OpenAI]]:
    service: Any = ScriptedService(TOKENIZER)
    template = ChatTemplate("{{ messages[0].content }}", {}, "the test")
    options: Any = {"chat_template": template, "tool_parser": "hermes"}
    with (
        serving_service(service, TOKENIZER, **options) as client,
        openai.OpenAI(
            base_url=f"http://127.0.0.1:{client.port}/v1", api_key="-", max_retries=0
        ) as sdk,
    ):
        yield service, client, sdk


@pytest.mark.parametrize("text, content, calls", TAGGED[3:12] + TAGGED[-5:])
def test_the_package_reads_them_whole_and_streamed(
    scene: Any, text: str, content: str, calls: Calls
) -> None:
    service, _, sdk = scene
    service.text = text
    fields = {**BODY, "model": MODEL, "n": 2}
    whole = sdk.chat.completions.create(**fields)
    with sdk.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion()
    for answer in (whole, streamed):
        for choice in answer.choices:
            assert choice.finish_reason == ("tool_calls" if calls else "stop")
            assert (choice.message.content or "") == content
            tool_calls = choice.message.tool_calls or []
            assert [(c.function.name, c.function.arguments) for c in tool_calls] == calls


def test_a_truncated_call_is_text_and_reports_length(
    scene: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, client, _ = scene
    monkeypatch.setattr(service, "reason", FinishReason.LENGTH)
    for text, calls in ((W[:-20], 0), (f"{W}\n{N[:-20]}", 1)):
        service.text = text
        _, answer, _ = client.post(BODY, CHAT)
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "length" and "<tool_call>" in choice["message"]["content"]
        assert len(choice["message"].get("tool_calls", [])) == calls


def test_events_of_a_call(scene: Any) -> None:
    """Text comes at once, a call in one piece; the first event has the role."""
    service, client, _ = scene
    service.text = f"Hold on. {W}{N}"
    deltas = [e["choices"][0]["delta"] for e in client.stream(BODY, CHAT)]
    assert deltas[0] == {"content": "Hol", "role": "assistant"}
    assert deltas[1] == {"content": "d o"}
    assert "".join(delta.get("content", "") for delta in deltas) == "Hold on."
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [(c["index"], c["type"], c["function"]["name"]) for c in calls] == [
        (0, "function", "weather"),
        (1, "function", "now"),
    ]
    assert len(deltas) == 6, "three of text, two calls, the end"
    deltas = [
        e["choices"][0]["delta"] for e in client.stream(BODY | {"parallel_tool_calls": False}, CHAT)
    ]
    assert sum(len(delta.get("tool_calls", [])) for delta in deltas) == 1


def test_with_tool_choice_none_a_call_is_text(scene: Any) -> None:
    service, client, _ = scene
    service.text = W
    for change in ({"tool_choice": "none"}, {"tools": []}):
        _, answer, _ = client.post(BODY | change, CHAT)
        (choice,) = answer["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (W, "stop")


def test_the_template_is_given_the_tools() -> None:
    template = "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}"

    def prompt(parser: ToolParser | None, **change: Any) -> str:
        model = toy_model(template, tool_parser=parser)
        (pending,) = parse_chat(json.dumps(BODY | change).encode(), model).prompts
        assert isinstance(pending, PendingPrompt)
        return TOKENIZER.decode(list(pending.make()))

    assert prompt("hermes") == prompt("llama3_json", tool_choice="auto") == "<weather><now>"
    assert prompt("hermes", tool_choice="none") == ""
    with pytest.raises(
        FieldError, match=r"tool_choice: 'auto'.*--tool-call-parser \(hermes, llama3"
    ):
        prompt(None)
