"""Conversations as clients send them, in the form that the model's template needs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cbatch import FieldError
from cbatch.text.forced_tools import call_id
from tests.server.apis import CHAT
from tests.server.parsing import ids_of, read
from tests.toy_engine import TOKENIZER

USER = {"role": "user", "content": "hi"}
FUNCTION = {"name": "ls", "arguments": '{"path": "."}'}
CALL = {"id": "call_1", "type": "function", "function": FUNCTION}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "a.txt"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def prompt_ids(template: str, *messages: dict[str, Any], **fields: Any) -> list[int]:
    """Return the prompt that a call becomes."""
    options: dict[str, Any] = {"tokenizer": TOKENIZER, "tool_parser": None}
    options |= {"reasoning_parser": "none", "max_model_len": 4096}
    return ids_of(read(CHAT, {"messages": messages} | fields, template, **options))


def prompt(template: str, *messages: dict[str, Any], **fields: Any) -> str:
    ids = prompt_ids(template, *messages, **fields)
    return TOKENIZER.decode(ids, skip_special_tokens=False)


def with_arguments(arguments: Any) -> dict[str, Any]:
    function = {"name": "ls", "arguments": arguments}
    return CALLED | {"tool_calls": [{"id": "1", "function": function}]}


# ---- null and [] ---------------------------------------------------------------------------------

# Conditions of templates, each of which tests for a member in another way.
CONDITIONS = {
    "in": "'{0}' in m",
    "defined": "m.{0} is defined",
    "get": "m.get('{0}', 'no') != 'no'",
    "keys": "'{0}' in m.keys()",
}


@pytest.mark.parametrize("condition", CONDITIONS.values(), ids=CONDITIONS)
@pytest.mark.parametrize("member", ["tool_calls", "function_call", "refusal", "name", "reasoning"])
def test_null_and_an_empty_list_count_as_absent(condition: str, member: str) -> None:
    template = f"{{% for m in messages %}}{{{{ {condition.format(member)} }}}},{{% endfor %}}"
    for role in ("user", "assistant", "system", "tool"):
        for empty in (None, []):
            message = {"role": role, "content": "x", member: empty}
            assert prompt(template, message, USER) == "False,False,"
    there = prompt(template, {"role": "user", "content": "x", "name": "n"}, USER)
    assert (there == "True,False,") is (member == "name")


def test_null_and_an_empty_list_count_as_absent_in_calls_and_tools() -> None:
    function = FUNCTION | {"strict": None, "x": []}
    call = {"id": "1", "type": None, "index": None, "function": function}
    listed = "{{ messages[1].tool_calls | tojson }}"
    expected = [CALL | {"id": "1", "function": {"name": "ls", "arguments": {"path": "."}}}]
    assert json.loads(prompt(listed, USER, CALLED | {"tool_calls": [call]})) == expected
    written = "{{ messages[1].tool_calls[0].function.arguments | tojson }}"
    for nothing in (None, "", "null", "{}", {}):
        assert prompt(written, USER, with_arguments(nothing)) == "{}"
    kept = prompt(written, USER, with_arguments('{"a": null, "b": []}'))
    assert json.loads(kept) == {"a": None, "b": []}, "these are the caller's"
    function = {"name": "f", "description": None, "parameters": None, "strict": None}
    fields = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    tools = json.loads(prompt("{{ tools | tojson }}", USER, **fields))
    assert tools == [{"type": "function", "function": {"name": "f"}}]


PRINTS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def test_content_may_be_empty() -> None:
    for said in ({"role": "assistant"}, CALLED):
        for content in ({"content": None}, {"content": []}, {"content": ""}):
            assert prompt(PRINTS, USER, said | content) == "<user>hi<assistant>"
    assert prompt(PRINTS, USER, {"role": "assistant"}) == "<user>hi<assistant>"


# ---- calls as templates take them ----------------------------------------------------------------

NULL_CONTENT = [
    "{% if m.content is none %}CALL{% else %}{{ m.content }}{% endif %}",
    "{% if m['content'] is not none %}{{ m['content'] }}{% else %}CALL{% endif %}",
    "{% set content = m.content %}{% if content == None %}CALL{% else %}{{ content }}{% endif %}",
    "{% set content = m.content %}{% if '</t>' in content %}{% endif %}"  # fails without a text
    "{% if content is none or m.tool_calls %}CALL{% else %}{{ content }}{% endif %}",
    '{% if m["content"]  is  none and m.tool_calls %}CALL{% else %}{{ m["content"] }}{% endif %}',
]


@pytest.mark.parametrize("body", NULL_CONTENT)
def test_a_template_that_tests_for_null_content_gets_it(body: str) -> None:
    template = f"{{% for m in messages %}}{body}{{% endfor %}}"
    without = {name: value for name, value in CALLED.items() if name != "content"}
    for said in (without, *(CALLED | {"content": content} for content in (None, "", []))):
        assert prompt(template, USER, said, RESULT) == "hiCALLa.txt"
    said = prompt(template, USER, {"role": "assistant", "content": None}, USER)
    assert said == "hihi", "the message has neither content nor calls"


SENT = '{"path":".",  "n": 1.50}'
WRITTEN = [
    "{{ 'ls ' + c.arguments }}",
    "ls {{ c.arguments }}",
    "{{ c.name ~ ' ' ~ c.arguments }}",
    "{{ '%s %s' | format(c.name, c.arguments) }}",
    "ls {{ c.arguments | trim }}",
    "ls {{ c.arguments.strip() }}",
    "ls {{ c.arguments[:1] + c.arguments[1:] }}",
    "{% if c.arguments is not string %}{{ raise_exception('a text') }}{% endif %}"
    "ls {{ c.arguments }}",
]


@pytest.mark.parametrize("write", WRITTEN)
def test_a_template_may_take_arguments_as_text(write: str) -> None:
    template = (
        "{% for m in messages %}{% for t in m.tool_calls or [] %}{% set c = t.function %}"
        f"{write}{{% endfor %}}{{% endfor %}}"
    )
    assert prompt(template, USER, with_arguments(SENT)) == f"ls {SENT}"


OBJECTS = [
    ("{{ a | tojson }}", '{"path": ".", "n": 1.5}'),
    ("{{ a.path }}{{ a['n'] }}", ".1.5"),
    ("{% for k, v in a.items() %}{{ k }}={{ v }};{% endfor %}", "path=.;n=1.5;"),
    ("{{ a if a is string else a | tojson }}", '{"path": ".", "n": 1.5}'),
    ("{{ a | items | list | length if a is mapping }}", "2"),
    ("{{ c | tojson }}", '{"name": "ls", "arguments": {"path": ".", "n": 1.5}}'),
]


@pytest.mark.parametrize(("write", "expected"), OBJECTS)
def test_a_template_may_take_arguments_as_an_object(write: str, expected: str) -> None:
    template = "{% set c = messages[1].tool_calls[0].function %}{% set a = c.arguments %}" + write
    for arguments in (SENT, json.loads(SENT)):
        assert prompt(template, USER, with_arguments(arguments)) == expected


def test_an_argument_may_be_named_text() -> None:
    template = "{% set a = messages[1].tool_calls[0].function.arguments %}{{ a.text }}"
    assert prompt(template, USER, with_arguments('{"text": "hello"}')) == "hello"


def test_gpt_oss_reads_earlier_thoughts_under_another_name() -> None:
    """It refuses them together with calls that have content."""
    earlier = CALLED | {"reasoning": "Hm."}
    template = "{% for m in messages %}{{ m.thinking }};{% endfor %}"
    assert prompt(template, earlier, earlier | {"content": "I look."}) == "Hm.;;"


NINE = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% if c.id|length != 9 %}{{ raise_exception('have 9') }}{% endif %}{{ c.id }},{% endfor %}"
    "{% if m.role == 'tool' %}{% if m.tool_call_id|length != 9 %}{{ raise_exception('have 9') }}"
    "{% endif %}{{ m.tool_call_id }},{% endif %}{% endfor %}"
)
ANY = NINE.replace("!= 9", "< 1")
JOINED = NINE.replace("{{ c.id }}", "{{ c.function.arguments + c.id }}")
IDS = ["call_5d8eab44bbeb4e5eba1a2898", "functions.ls:0", "1", "a b c d e", "12345678é"]


@pytest.mark.parametrize("call", IDS)
def test_ids_are_shortened_for_templates_that_require_nine_letters(call: str) -> None:
    calls = [CALL | {"id": call}, CALL | {"id": f"{call}2"}]
    results = [RESULT | {"tool_call_id": each["id"]} for each in calls]
    messages = [USER, CALLED | {"tool_calls": calls}, *results]
    first, second, *again = prompt(NINE, *messages).split(",")[:4]
    assert first.isalnum() and first.isascii() and [first, second] == again != [second, first]
    assert prompt(NINE, *messages) == prompt(NINE, *messages)
    joined = prompt(JOINED, *messages).split(",")
    assert joined[0] == FUNCTION["arguments"] + first
    if call.isascii():  # other templates get the ids unchanged
        assert prompt(ANY, *messages).split(",")[:2] == [call, f"{call}2"]


def test_the_servers_own_ids_are_not_changed() -> None:
    made = call_id()
    messages = [CALLED | {"tool_calls": [CALL | {"id": made}]}, RESULT | {"tool_call_id": made}]
    assert prompt(NINE, USER, *messages) == f"{made},{made},"


# ---- roles ---------------------------------------------------------------------------------------

SOME = PRINTS.replace("<{{", "{% if m.role in (ROLES) %}<{{").replace(
    "{% endfor", "{% endif %}{% endfor"
)
DEVELOPER = {"role": "developer", "content": "In French."}
RETURNED = {"role": "function", "name": "ls", "content": "a.txt"}


def knowing(*roles: str) -> str:
    return SOME.replace("ROLES", ", ".join(map(repr, roles)))


def test_a_role_that_the_template_does_not_know_gets_its_other_name() -> None:
    qwen = knowing("system", "user", "assistant", "tool") + "{{ tools['function'] }}"
    harmony = knowing("developer", "system", "user", "function")
    for template, developer, returned in (
        (qwen, "system", "tool"),
        (PRINTS, "system", "tool"),
        (harmony, "developer", "function"),
    ):
        assert prompt(template, DEVELOPER, USER) == f"<{developer}>In French.<user>hi"
        assert prompt(template, USER, RETURNED) == f"<user>hi<{returned}>a.txt"


@pytest.mark.parametrize(
    ("template", "messages", "role"),
    [
        (knowing("assistant"), [DEVELOPER, {"role": "assistant", "content": "x"}], "developer"),
        (knowing("user", "assistant"), [USER, CALLED, RESULT], "tool"),
        (knowing("user", "assistant", "system"), [USER, RETURNED], "function"),
    ],
)
def test_a_message_that_the_template_would_drop_is_rejected(
    template: str, messages: list[dict[str, Any]], role: str
) -> None:
    words = f"messages: the chat template refuses them .it drops messages of the role '{role}'"
    with pytest.raises(FieldError, match=words):
        prompt(template, *messages)


# ---- what cannot be rendered ---------------------------------------------------------------------

REFUSES = r"refuses them \(no\); change the conversation as it says"
CANNOT = r"cannot render them \(.*\); start the server with another --chat-template"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('no') }}", REFUSES),
        (
            "{{ 'x' in messages[-2].content }}{{ messages[-2].content is none }}"
            "{{ raise_exception('no') }}",
            REFUSES,
        ),
        ("{{ 'a' + 1 }}", CANNOT),
        ("{{ messages[9].content }}", CANNOT),
        ("{{ nothing.there }}", CANNOT),
    ],
)
def test_errors_of_templates_name_the_remedy(template: str, words: str) -> None:
    for messages in ([USER, USER], [USER, CALLED, RESULT]):
        with pytest.raises(FieldError, match=f"messages: the chat template {words}"):
            prompt(template, *messages)


def test_errors_about_deep_messages_name_the_field() -> None:
    deep: Any = "x"
    for _ in range(900):
        deep = [deep]
    with pytest.raises(FieldError, match="messages: are nested too deeply"):
        prompt(PRINTS, USER | {"deep": deep})


# ---- control tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [END := "<|endoftext|>", "\\u003c|endoftext|>"])
def test_control_tokens_in_any_field_are_text(path: str) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{{ m.name }}{% for c in m.tool_calls or [] %}"
        "{{ c.id }}{{ c.function.arguments }}{{ c.function.arguments | tojson }}{% endfor %}"
        "<|endoftext|>{% endfor %}{{ tools | tojson }}{{ mark }}"
    )
    written = f'{{"path": "{path}"}}'
    function = {"name": "f", "description": END, "parameters": {"properties": {END: {}}}}
    fields: dict[str, Any] = {"tools": [{"type": "function", "function": function}]}
    calls = [{"id": END, "function": {"name": "ls", "arguments": written}}]
    messages = [USER | {"content": END, "name": END}, CALLED | {"tool_calls": calls}]
    variables = {"tool_choice": "required", "chat_template_kwargs": {"mark": [END]}}
    ids = prompt_ids(template, *messages, **fields, **variables)
    assert ids.count(0) == 2, "the template's own"
    text = TOKENIZER.decode(ids, skip_special_tokens=False)
    again = json.dumps(json.loads(written))
    assert text == f"{END * 4}{written}{again}{END}{json.dumps(fields['tools'])}['{END}']"
