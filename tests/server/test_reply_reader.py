"""Replies are parsed into thought, calls and answer, in every format and split at any place.

`read` returns what a stream sends. A script contains the expected result for any split.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.core.request.request import FinishReason, StructuredOutputs
from cbatch.text.forced_tools import (
    ForcedCall,
    ForcedCallReader,
    Function,
    JsonEnd,
    Tool,
    ToolCallPart,
)
from cbatch.text.reply_formats import ReplyFormat
from cbatch.text.reply_reader import Part, ReplyReader, Thought, read_reply
from cbatch.text.tool_parsers import (
    CALLS,
    THOUGHTS,
    ToolParser,
    find_reasoning_parser,
    find_tool_parser,
)
from cbatch.text.written_calls import text_parameters

Calls = list[tuple[str, str]]
ROME = '{"city": "Rome", "days": 1.50}'
OBJECT = f'{{"name": "f", "arguments": {ROME}}}'
COHERE = f'{{"tool_call_id": "0", "tool_name": "f", "parameters": {ROME}}}'
COHERE_CALLS = f"<|START_ACTION|>[\n    {COHERE},\n    {COHERE}\n]<|END_ACTION|>"
F, G = ("f", ROME), ("g", "{}")
TAG = f"<tool_call>\n{OBJECT}\n</tool_call>"
TRICKY = '{"xml": "<tool_call>{}</tool_call>", "s": "\\"}"}'
TRICKY_TAG = f'<tool_call>{{"name": "write", "arguments": {TRICKY}}}</tool_call>'
QUOTED = f'<tool_call>{{"name": "write", "arguments": {json.dumps(TRICKY)}}}</tool_call>'
BAD = '<tool_call>{"name": "f", "arguments": {oops}}</tool_call>'
FINAL, END = "<|channel|>final<|message|>", "<|end|><|start|>assistant"
ANALYSIS = "<|channel|>analysis<|message|>"
COMMENTARY = "<|channel|>commentary"
TO_F = f"{COMMENTARY} to=functions.f <|constrain|>json<|message|>{ROME}"
TO_G = f"{COMMENTARY} to=functions.g<|message|>"
QWEN = (
    "<tool_call>\n<function=f>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n1.50\n"
    "</parameter>\n</function>\n</tool_call>"
)
GLM = (
    "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>1.50</arg_value>\n</tool_call>"
)
SHORT = '{"city":"Rome","days":1.50}'
GEMMA = '<|tool_call>call:f{city:<|"|>Rome<|"|>,days:1.50}<tool_call|>'


class Script(NamedTuple):
    """A reply and its expected parts; `calls` and `thoughts` name the formats."""

    calls: Any
    thoughts: str
    text: str
    content: str = ""
    thought: str = ""
    expected_calls: Calls = []
    in_thought: bool = False


def same(text: str) -> tuple[str, str]:
    """Return a reply that is all answer."""
    return text, text


# By the formats of calls and thoughts: replies, with answer, thought and calls.
REPLIES: dict[tuple[str | None, str], list[Any]] = {
    (None, "qwen3"): [  # the model opens and closes its thought, or leaves it out
        ("<think>\nHm.\n</think>\n\nYes. ", "Yes. ", "Hm."),
        ("\n<think>\n\n</think>\n\nYes", "Yes"),
        same("Yes, <think> is a tag, </think> too"),
        same(" \n<thin"),
        ("<think> a </thin b  ", "", "a </thin b"),
        ("<think>a</think> <think>b</think>", "<think>b</think>", "a"),
        ("<think>a</think>\n", "", "a"),
        ("a\n\nb</think>c", "c", "a\n\nb", [], True),
        same(""),
    ],
    (None, "deepseek_r1"): [  # the prompt opens the thought; the model may write the mark again
        ("a</think>b", "b", "a", [], True),
        ("<think>\na</think>\nb", "b", "a", [], True),
        ("<thin</think>b", "b", "<thin", [], True),
        ("</think>b", "b", "", [], True),
        ("no answer yet ", "", "no answer yet", [], True),
    ],
    (None, "gemma4"): [("<|channel>thought\na<channel|>b", "b", "a"), same("a <|channel>final")],
    (None, "mistral"): [("[THINK]a [/THINKER] b[/THINK]c", "c", "a [/THINKER] b")],
    ("hermes", "qwen3"): [  # tags anywhere; a call in a thought, or a tag without a call, is text
        (f"<think>maybe {TAG}? No.</think>\nNo.", "No.", f"maybe {TAG}? No."),
        (f"<think>Now <tool_call>.</think>\n{TAG}", "", "Now <tool_call>.", [F]),
        (f"<think>a</think>\n\nb\n{TAG} c", "b c", "a", [F]),
        (f"a</think>{TAG}</think> d", "</think> d", "a", [F], True),
        (f"Write <tool_call> and {TAG}", "Write <tool_call> and", "", [F]),
        (f"<tool_call> <tool_call>\n{TAG}", "<tool_call> <tool_call>", "", [F]),
        (f"<tool_call>{OBJECT}\n{TAG}", "", "", [F, F]),
        (f'<tool_call>{{"name": "f"\n{TAG}', '<tool_call>{"name": "f"', "", [F]),
        (f"<tool_call>{OBJECT} so", " so", "", [F]),
        (f"<tool_call>{OBJECT}<", "", "", [F]),
        same('<tool_call>{"a": "<tool_call>'),
        same('<tool_call>{"a": [1, 2]}</tool_call>'),
        same("Plain, with a < b, and <tool"),
        same(" \n"),
        (f"\n{TAG}\n", "", "", [F]),
        (f"{TAG}{TRICKY_TAG}{TAG}", "", "", [F, ("write", TRICKY), F]),
        (f"a {TAG} b {TAG} c", "a b c", "", [F, F]),
        (f"<tool_call{TAG}", "<tool_call", "", [F]),
        (TAG.removesuffix("</tool_call>"), "", "", [F]),
        (TAG.removesuffix("_call>"), "", "", [F]),
        same(f"{'x' * 60} {TAG[:-20]}"),
        (f"{TAG}\n {BAD}", f"\n {BAD}", "", [F]),
        ('<tool_call>{"arguments": null, "name": "g"}</tool_call>', "", "", [G]),
        ('<tool_call>{"name": "g"}</tool_call>', "", "", [G]),
        ('<tool_call>{"name": "g", "arguments": ""}</tool_call>', "", "", [G]),
        (QUOTED, "", "", [("write", TRICKY)]),
    ],
    ("llama3_json", "qwen3"): [  # the reply consists of calls from its beginning
        (f"<think>{OBJECT}</think>\n{OBJECT}", "", OBJECT, [F]),
        (f'{OBJECT}; {{"name": "g", "parameters": {{}}}}\n', "", "", [F, G]),
        (f"{OBJECT}; then", "; then", "", [F]),
        same(f'{{"a": 1}} {OBJECT}'),
        same("Hello {"),
        same(f"See: {OBJECT}"),
        same(OBJECT[:-1]),
        same('{"name": "Bob", "age": 7}'),
        ('{"type": "function", "name": "g", "parameters": null}', "", "", [G]),
        (f'{{"name": "f", "arguments": null, "parameters": {ROME}}}', "", "", [F]),
    ],
    # Older and newer. A call may lack arguments, have null, or have the object as a text.
    ("mistral", "mistral"): [
        (f'a [TOOL_CALLS] [{OBJECT}, {{"name": "g", "arguments": {{}}}}] ', "a", "", [F, G]),
        (f"[TOOL_CALLS]f[ARGS]{ROME}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{{}}", "", "", [F, G]),
        (f"[TOOL_CALLS]f{ROME}", "", "", [F]),
        (f"[THINK][TOOL_CALLS]f{ROME}[/THINK]b", "b", f"[TOOL_CALLS]f{ROME}"),
        (f"[TOOL_CALLS] [{OBJECT}, and so", ", and so", "", [F]),
        (f'[TOOL_CALLS][{{"name": "g"}}, {OBJECT}]', "", "", [G, F]),
        ("[TOOL_CALLS]g[ARGS] [TOOL_CALLS]g", "", "", [G, G]),
        ("[TOOL_CALLS]g[CALL_ID]x1[ARGS]null", "", "", [G]),
        (f"[TOOL_CALLS]f[ARGS]{json.dumps(ROME)} b", " b", "", [F]),
        same("[TOOL_CALLS]g nullable"),
        same('[TOOL_CALLS]g "x" {'),
        same("[TOOL_CALLS] is a token"),
    ],
    ("granite", "qwen3"): [
        (f'a <|tool_call|>[{OBJECT}, {{"name": "g", "arguments": {{}}}}]', "a", "", [F, G]),
        (f"<think>{OBJECT}</think><|tool_call|> {OBJECT}", "", OBJECT, [F]),
        same("<|tool_call|>[1]"),
    ],
    ("cohere", "cohere"): [
        (f"<|START_THINKING|>a<|END_THINKING|>\n{COHERE_CALLS}", "", "a", [F, F]),
        (f"<|START_ACTION|>{COHERE}\n<|END_ACTION|>", "", "", [F]),
        ("<|START_RESPONSE|>Yes.<|END_RESPONSE|>", "Yes."),
        ("a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>", "b", "a", [], True),
        same("Hello"),
    ],
    ("phi4_mini_json", "qwen3"): [
        (f'functools[{OBJECT}, {{"name": "g", "arguments": {{}}}}] ', "", "", [F, G]),
        same("import functools\nfunctools.cache"),
        same("functools [1]"),
    ],
    (None, "harmony"): [  # gpt-oss
        (f"{ANALYSIS}Hm.{END}{FINAL}Yes.<|return|>", "Yes.", "Hm."),
        (
            f"{ANALYSIS}a{END}{ANALYSIS}b{END}<|channel|>final <|constrain|>json<|message|>{{}}",
            *("{}", "ab"),
        ),
        (f"{FINAL}<think> and <|x", "<think> and <|x"),
        (f"{ANALYSIS}cut <|en", "", "cut <|en"),
        (f"{ANALYSIS}a{END}<|channel|>fin", "", "a"),
        same("plain"),
    ],
    ("harmony", "harmony"): [
        (f"{ANALYSIS}{TO_F}{END}{TO_F}<|call|>", "", TO_F, [F]),
        (f"{COMMENTARY}<|message|>I look.{END}{TO_F}", "I look.", "", [F]),
        (f" to=functions.f{COMMENTARY} json<|message|>{ROME}", "", "", [F]),
        (f"{ANALYSIS}a{END} to=functions.g<|channel|>analysis<|message|>{{}}", "", "a", [G]),
        (f"{TO_G}<|call|>", "", "", [G]),
        (f"{TO_G}null{END}{TO_G}", "", "", [G, G]),
        (f"{TO_G}{json.dumps(ROME)}", "", "", [("g", ROME)]),
        same(TO_F[:-1]),
        (f"{FINAL}go to=functions.f", "go to=functions.f"),
    ],
    # Calls that are not JSON. Values that are not JSON are texts.
    ("qwen3_coder", "qwen3"): [
        (f"<think>a {QWEN}</think>b\n\n{QWEN}\n{QWEN}\n", "b", f"a {QWEN}", [F, F]),
        (f"<tool_call> and {QWEN} so", "<tool_call> and so", "", [F]),
        (QWEN.removesuffix("</function>\n</tool_call>"), "", "", [F]),
        ("<tool_call><function=g></function></tool_call>", "", "", [G]),
        (
            "<tool_call><function=g><parameter=a>\n\n <b>\n</parameter><parameter=c>True"
            "</parameter></tool_call>",
            *("", "", [("g", '{"a": "\\n <b>", "c": true}')]),
        ),
        same("<tool_call><function=f"),
        same("<tool_call>\n<functions>"),
    ],
    ("seed_oss", "seed_oss"): [
        (QWEN.replace("tool_call", "seed:tool_call"), "", "", [F]),
        same(QWEN),
    ],
    ("glm45", "qwen3"): [
        (f"<think>a</think>\n{GLM}\n<tool_call>g\n</tool_call>", "", "a", [F, G]),
        (GLM.replace("\n", ""), "", "", [F]),
        same("<tool_call>f x</tool_call>"),
    ],
    ("gemma4", "gemma4"): [
        (f"<|channel>thought\na<channel|>{GEMMA}{GEMMA}", "", "a", [("f", SHORT)] * 2),
        (
            'b <|tool_call>call:f{a:{b-c:[<|"|>x:{"<|"|>,true,null],d:{}},e:-1}<tool_call|>',
            *("b", "", [("f", '{"a":{"b-c":["x:{\\"",true,null],"d":{}},"e":-1}')]),
        ),
        ("<|tool_call>call:g{}", "", "", [("g", "{}")]),
        same("<|tool_call>call:f{a:b}<tool_call|>"),
        same("<|tool_call>calls"),
    ],
}
SCRIPTS = [Script(*formats, *row) for formats, rows in REPLIES.items() for row in rows]


@pytest.mark.parametrize("start", ["[TOOL_CALLS]", "[TOOL_CALLS]now[ARGS]", '{"name": "x"}'])
def test_a_call_without_arguments_has_a_known_name_and_is_not_cut(start: str) -> None:
    """A name alone may also be the beginning of a longer name, or an answer."""
    calls = CALLS["llama3_json" if start.startswith("{") else "mistral"]

    def read_calls(text: str, *, cut: bool) -> int:
        reader = ReplyReader(ReplyFormat(calls, names=frozenset({"now", "x.now"})))
        parts = [*reader.push(text), *reader.finish(cut=cut)]
        return sum(isinstance(part, ToolCallPart) for part in parts)

    known = {'{"name": "x"}': '{"name": "x.now"}', "[TOOL_CALLS]": "[TOOL_CALLS]now"}
    whole = known.get(start, start)
    assert read_calls(whole, cut=False) == 1
    assert read_calls(whole, cut=True) == (1 if whole.startswith("{") else 0)
    assert read_calls(whole.replace("now", "later"), cut=False) == 0


def test_a_value_of_type_string_is_a_text() -> None:
    schema = {"properties": {"city": {}, "days": {"type": "string"}, "odd": 1}}
    tools = [Tool("function", Function("f", parameters=schema)), Tool("function", Function("g"))]
    for calls, text in (("qwen3_coder", QWEN), ("glm45", GLM)):
        reader = ReplyReader(ReplyFormat(CALLS[calls], texts=text_parameters(tools)))
        assert message(read(reader, [text]))[2] == [("f", '{"city": "Rome", "days": "1.50"}')]
        cut = ReplyReader(ReplyFormat(CALLS[calls]))
        assert message(flat([*cut.push(text[:-1]), *cut.finish(cut=True)]))[0] == text[:-1]


@pytest.mark.parametrize("value", ["None", "True", "12345", "null"])
def test_texts_look_like_anything(value: str) -> None:
    texts = {"a": {"type": "string"}, "b": {"enum": ["x"]}, "c": {"type": ["string", "null"]}}
    texts["d"] = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    tools = [Tool("function", Function("f", parameters={"properties": texts}))]
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key in texts)
    text = f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>"
    reader = ReplyReader(ReplyFormat(CALLS["qwen3_coder"], texts=text_parameters(tools)))
    ((_, arguments),) = message(read(reader, [text]))[2]
    nullable = None if value in ("None", "null") else value
    assert json.loads(arguments) == dict.fromkeys("ab", value) | dict.fromkeys("cd", nullable)


@pytest.mark.parametrize(
    "calls, text",
    [
        ("qwen3_coder", "<tool_call>\n<function=f>\nb: 1, c: 2\n</function>\n</tool_call>"),
        ("qwen3_coder", QWEN.replace("</tool_call>", "") + QWEN.removeprefix("<tool_call>")),
        ("qwen3_coder", QWEN.partition("1.50")[0]),
        ("qwen3_coder", f"<tool_call><function=f>{' ' * 100_000}x</tool_call>"),
        ("glm45", GLM.replace("</arg_key>", "</arg_key><arg_key>", 1)),
        ("glm45", GLM.replace("1.50</arg_value>", "1.50")),
        ("glm45", f"<tool_call>f<arg_key>{' ' * 100_000}</tool_call>"),
    ],
)
def test_a_call_that_is_not_whole_is_text(calls: ToolParser, text: str) -> None:
    """Long runs of spaces take no time: a pattern of two loops would take minutes."""
    reader = ReplyReader(ReplyFormat(CALLS[calls]))
    assert message(read(reader, [text]))[::2] == (text, [])


@pytest.mark.parametrize("stop, calls", [(None, [F]), ("</function>", [])])
def test_a_call_that_a_client_s_stop_string_ends_is_text(stop: str | None, calls: Calls) -> None:
    text = QWEN.removesuffix("</function>\n</tool_call>")
    done = SimpleNamespace(finish_reason=FinishReason.STOP, stop_string=stop)
    output: Any = SimpleNamespace(
        pieces=[text], token_ids=[1], num_accepted=0, text=text, finished=done
    )
    parts = [part for part, _ in read_reply(output, ReplyReader(ReplyFormat(CALLS["qwen3_coder"])))]
    written = [(part.name, part.arguments) for part in parts if isinstance(part, ToolCallPart)]
    assert written == calls


def reader_of(script: Script, *, separate: bool = True, parallel: bool = True) -> ReplyReader:
    calls, thoughts = CALLS[script.calls] if script.calls else None, THOUGHTS[script.thoughts]
    form = ReplyFormat(calls, thoughts, separate=separate, parallel=parallel)
    return ReplyReader(form, thoughts.open_mark if script.in_thought else thoughts.close_mark)


def flat(parts: Sequence[Part]) -> list[Any]:
    """Return characters of the answer, characters of a thought (as `Thought`), and calls, in their
    order."""
    result: list[Any] = []
    for part in parts:
        if isinstance(part, ToolCallPart):
            result.append((part.name, part.arguments))
        else:
            assert part, "an empty part"
            result += [type(part)(character) for character in part]
    return result


def read(reader: ReplyReader, pieces: Sequence[str]) -> list[Any]:
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    calls = [part for part in parts if isinstance(part, ToolCallPart)]
    assert [call.call for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls) and reader.complete == bool(calls)
    return flat(parts)


def message(parts: list[Any]) -> tuple[str, str, Calls]:
    calls = [each for each in parts if isinstance(each, tuple)]
    content, thought = ("".join(x for x in parts if type(x) is kind) for kind in (str, Thought))
    return content, thought, calls


def cuts(text: str) -> Iterator[list[str]]:
    yield list(text)
    for at in range(len(text) + 1):
        yield [text[:at], text[at:]]
        yield [text[:at], text[at : at + 1], text[at + 1 :]]


@pytest.mark.parametrize(
    "script", SCRIPTS, ids=lambda script: f"{script.calls} {script.text[:40]!r}"
)
def test_a_reply_is_read_the_same_however_it_is_cut(script: Script) -> None:
    want = read(reader_of(script), [script.text])
    assert message(want) == (script.content, script.thought, script.expected_calls)
    raw = read(reader_of(script, separate=False), [script.text])
    if not (script.expected_calls or THOUGHTS[script.thoughts].dropped_marks):
        assert message(raw) == (script.text, "", [])
    assert message(raw)[2] == script.expected_calls
    for pieces in cuts(script.text):
        assert read(reader_of(script), pieces) == want, pieces
        assert read(reader_of(script, separate=False), pieces) == raw, pieces
    one = read(reader_of(script, parallel=False), [script.text])
    assert message(one) == (script.content, script.thought, script.expected_calls[:1])


@pytest.mark.parametrize("text", ["[" * 9000, '{"a":' * 9000])
def test_deep_nesting_is_text(text: str) -> None:
    for pieces in ([text], list(text)):
        reader = ReplyReader(ReplyFormat(CALLS["llama3_json"]))
        assert message(read(reader, pieces)) == (text, "", [])


FRAGMENTS = [
    *(TAG, OBJECT, TO_F, ANALYSIS, FINAL, END, "<|call|>", "<tool_call>", "</tool_call>"),
    *("<think>", "</think>", "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", "{", "}", "]"),
    *("f", "; ", ", ", '"', "\\", " ", "\n", "a", "<", "[", " to=functions.f", "<|message|>"),
    *(QWEN, GLM, GEMMA, "<function=f>", "<|tool_call>", "call:", "<tool_call|>"),
]


@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=9),
    st.lists(st.integers(0, 400), max_size=8),
    st.sampled_from([*CALLS, None]),
    st.sampled_from([*THOUGHTS, None]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=120)
def test_any_fragments_are_read_the_same_however_they_are_cut(
    texts: list[str], places: list[int], calls: Any, thoughts: Any, separate: bool, begun: bool
) -> None:
    text = "".join(texts)
    at = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    pieces = [text[a:b] for a, b in zip(at, at[1:], strict=False)]

    def reader() -> ReplyReader:
        known = thoughts and THOUGHTS[thoughts]
        form = ReplyFormat(calls and CALLS[calls], known, separate=separate and known is not None)
        return ReplyReader(form, known.open_mark if begun and known else "")

    want = read(reader(), [text])
    assert read(reader(), pieces) == read(reader(), list(text)) == want
    if thoughts != "harmony" and not (separate or any(isinstance(x, tuple) for x in want)):
        assert "".join(want) == text, "without calls nothing is lost"


@pytest.mark.parametrize("formats", REPLIES, ids=str)
def test_text_that_begins_no_mark_comes_at_once(formats: tuple[str | None, str]) -> None:
    begin = FINAL if formats[1] == "harmony" else ""
    for text, pending in (("Yes, it is", ""), ("Is a < b", ""), ("a\n\nb", ""), ("So ", " ")):
        reader = reader_of(Script(*formats, text))
        reader.push(begin)
        shown = "".join(str(part) for part in reader.push(text))
        assert shown in (text, text.removesuffix(pending)), text


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=8,
    ).filter(lambda value: isinstance(value, dict)),
    st.text(max_size=4),
    st.booleans(),
)
@settings(max_examples=25)
def test_the_end_of_an_object_is_where_a_parser_finds_it(
    value: dict[str, Any], after: str, ascii_only: bool
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    whole, piecewise = JsonEnd(), JsonEnd()
    assert whole.push(text + after) == len(text) and not whole.broken
    assert [piecewise.push(character) for character in text] == [*[None] * (len(text) - 1), 1]


@pytest.mark.parametrize("text", ["{o", '{"a" <', "{x", '{"a\n', "{'", '{"a": 1}['])
def test_invalid_json_is_detected_at_the_first_wrong_character(text: str) -> None:
    for at in range(len(text) - 1):
        begun = JsonEnd()
        begun.push(text[:at])
        assert not begun.broken
    end = JsonEnd()
    end.push(text)
    assert end.broken == (text != '{"a": 1}[')


FORCED = ForcedCall(None, StructuredOutputs(json_object=True))


def test_forced_calls_come_after_a_thought() -> None:
    thought = '[{"name": "x", "arguments": {}}]'
    text = f"<think>{thought}</think>\n\n[{OBJECT}]"
    for separate in (True, False):
        for pieces in cuts(text):
            form = ReplyFormat(None, THOUGHTS["qwen3"], FORCED, separate=separate)
            reader = ReplyReader(form)
            parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
            calls = [part for part in parts if isinstance(part, ToolCallPart)]
            assert "".join(call.arguments for call in calls) == ROME and calls[0].name == "f"
            assert {call.call for call in calls} == {0} and reader.complete
            thought_text = "".join(part for part in parts if not isinstance(part, ToolCallPart))
            assert thought_text == (thought if separate else f"<think>{thought}</think>")


@pytest.mark.parametrize(
    "template, parser",
    [
        ("{{ '<|im_start|>assistant\n' }}{% if not enable_thinking %}<think>\n\n</think>", "qwen3"),
        ("{{ content.split('</think>')[-1] }}<｜Assistant｜>", "deepseek_r1"),
        ("{{ content.split('</think>')[-1] }}<|start_header_id|>assistant", "qwen3"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony"),
        ("[SYSTEM_PROMPT]think in [THINK][/THINK]", "mistral"),
        ("{{ '<|channel>thought\\n' }}", "gemma4"),
        ("{% set begin = '<seed:think>' %}", "seed_oss"),
        ("Start by writing <|START_THINKING|> followed by a plan", "cohere"),
        ("<|im_start|>assistant\n", "none"),
        ("", "none"),
    ],
)
def test_the_reasoning_parser_is_found_by_the_template(template: str, parser: Any) -> None:
    assert find_reasoning_parser("auto", template) == parser
    assert find_reasoning_parser("none", template) == "none"
    assert find_reasoning_parser("qwen3", template) == "qwen3"


@pytest.mark.parametrize(
    "template, parser",
    [
        ('within <tool_call></tool_call>: {"name": <name>, "arguments": <args>}', "hermes"),
        ("<tool_call>\n<function=name>\n<parameter=a> {{ call.arguments }}", "qwen3_coder"),
        ("<seed:tool_call>\n<function=example>", "seed_oss"),
        ("<tool_call>{name}\n<arg_key>{arguments}</arg_key>", "glm45"),
        ("{{ '<|tool_call>call:' + name + '{' }}", "gemma4"),
        ("<tool_call><invoke name=", None),
        ("<|START_ACTION|>[{'tool_name': {{ call.name }}}]<|END_ACTION|>", "cohere"),
        ("<|start|>assistant<|channel|>commentary to=functions", "harmony"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ("<|start_of_role|>assistant: only with <|tool_call|> followed by a JSON list", "granite"),
        ("{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}", "phi4_mini_json"),
        ('<|start_header_id|> {"name": function name, "parameters": dictionary}', "llama3_json"),
        ("<|im_start|>assistant\n", None),
    ],
)
def test_the_tool_parser_is_found_by_the_template(template: str, parser: Any) -> None:
    assert find_tool_parser("auto", template) == parser
    assert find_tool_parser("none", template) is None
    assert find_tool_parser("hermes", template) == "hermes"


@pytest.mark.parametrize(
    "prompt, qwen3, deepseek_r1",
    [
        ("<|im_start|>assistant\n", False, True),
        ("<|im_start|>assistant\n<think>\n", True, True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False, False),
        ("<think> means? <|im_end|>\n<|im_start|>assistant\n", False, True),
        ("", False, True),
    ],
)
def test_the_prompt_decides_whether_a_reply_begins_in_a_thought(
    prompt: str, qwen3: bool, deepseek_r1: bool
) -> None:
    assert THOUGHTS["qwen3"].reply_starts_inside(prompt) is qwen3
    assert THOUGHTS["deepseek_r1"].reply_starts_inside(prompt) is deepseek_r1


ARGUMENTS = ('{"city": "a}]b\\"{[", "days": 1}', "{}", '{"a": {"b": [1, {"c": "\\\\"}]}}')
LISTED = "[" + ", ".join(f'{{"name": "f{n}", "arguments": {a}}}' for n, a in enumerate(ARGUMENTS))


def forced_calls(reader: ForcedCallReader, pieces: list[str]) -> Calls:
    calls: Calls = []
    for part in (part for piece in pieces for part in reader.push(piece)):
        if part.call == len(calls):
            assert part.id is not None
            calls.append((part.name or "", ""))
        name, arguments = calls[part.call]
        calls[part.call] = (name, arguments + part.arguments)
    return calls


def test_forced_calls_are_read_however_the_text_is_cut() -> None:
    for pieces in cuts(LISTED):
        reader = ForcedCallReader(None)
        assert forced_calls(reader, pieces) == [(f"f{n}", a) for n, a in enumerate(ARGUMENTS)]
        assert not reader.complete
        assert reader.push("]") == [] and reader.complete
    for arguments in ARGUMENTS:
        for pieces in cuts(arguments):
            named = ForcedCallReader("g")
            assert forced_calls(named, pieces) == [("g", arguments)] and named.complete
        named = ForcedCallReader("g")
        named.push(arguments[:-1])
        assert not named.complete
