"""System and developer messages at any place, with the templates of the main families.

The templates here are small: each treats roles, and the order of turns, as those of its family do.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from cbatch.text import ChatTemplate, ChatTemplateError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TURN = "<{{ m.role }}>{{ m.content }}</s>"
LOOP = "{% for m in messages %}"
FIRST = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}</s>"
    "{% set messages = messages[1:] %}{% endif %}"
)
# User and assistant must alternate; results and replies with calls are not counted.
ALTERNATE = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role in ('user', 'system') "
    "or m.role == 'assistant' and not m.tool_calls %}{% if (m.role == 'user') != (ns.n % 2 == 0) "
    "%}{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.n = ns.n + 1 %}"
    "{% endif %}{% endfor %}"
)
END = "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def knowing(*roles: str) -> str:
    return LOOP + f"{{% if m.role in {roles} %}}{TURN}{{% endif %}}" + END


FAMILIES: dict[str, str] = {
    "ChatML, Llama 3, Phi-4, GLM-4, SmolLM2": LOOP + TURN + END,
    "Qwen2.5, Qwen3, Granite, Hermes": FIRST + knowing("user", "system", "assistant", "tool"),
    "Qwen3.5": LOOP
    + "{% if m.role == 'system' and not loop.first %}{{ raise_exception('must be first') }}"
    + "{% endif %}"
    + TURN
    + END,
    "Mistral v3": "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}"
    + ALTERNATE
    + LOOP
    + "{% if m.role == 'user' %}[INST] {% if loop.last and system %}{{ system }}\n\n{% endif %}"
    "{{ m.content }}[/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}",
    "Mistral v7": LOOP
    + "{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
    + "{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role in ('assistant', "
    + "'tool') %}{{ m.content }}</s>{% else %}{{ raise_exception('unknown role') }}{% endif %}"
    + "{% endfor %}",
    "Ministral": FIRST
    + ALTERNATE
    + LOOP
    + "{% if m.role == 'system' %}{{ raise_exception('only user, assistant and tool') }}{% endif %}"
    + TURN
    + END,
    "Gemma 2": "{% if messages[0].role == 'system' %}{{ raise_exception('not supported') }}"
    "{% endif %}" + ALTERNATE + LOOP + TURN + END,
    "Gemma 3, Llama 2": "{% set first = '' %}{% if messages[0].role == 'system' %}"
    "{% set first = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}{% endif %}"
    + ALTERNATE
    + LOOP
    + "<{{ m.role }}>{{ first if loop.first }}{{ m.content | trim }}</s>"
    + END,
    "Phi-3, which knows no system": knowing("user", "assistant", "tool"),
    "gpt-oss": "{% if messages[0].role in ('system', 'developer') %}<developer>"
    "{{ messages[0].content }}</s>{% set messages = messages[1:] %}{% endif %}"
    + knowing("user", "assistant", "tool"),
    "DeepSeek": "{% for m in messages if m.role == 'system' %}{{ m.content }}\n\n{% endfor %}"
    + knowing("user", "assistant", "tool"),
    "SmolLM3": FIRST + knowing("user", "assistant", "tool"),
    "Command-R": FIRST + ALTERNATE + LOOP + TURN + END,
}
# These write the first system message, or all, at a place that moves with each turn.
MOVING = ("Mistral v3", "DeepSeek")


def made(*turns: str) -> list[dict[str, Any]]:
    """Return messages from `role text`. A reply of calls is `calls`."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages: list[dict[str, Any]] = []
    for turn in turns:
        role, _, text = turn.partition(" ")
        if role == "calls":
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        else:
            messages.append({"role": role, "content": text})
            if role == "tool":
                messages[-1]["tool_call_id"] = "abcdefghi"
    return messages


CONVERSATIONS: dict[str, list[str]] = {
    "one": ["system RULE-A", "user hi"],
    "alone": ["system RULE-A"],
    "two at the start": ["system RULE-A", "system RULE-B", "user hi"],
    "instructions and developer": ["system RULE-A", "developer RULE-B", "user hi"],
    "developer alone": ["developer RULE-A", "user hi"],
    "three": ["developer RULE-A", "system RULE-B", "developer RULE-C", "user hi"],
    "between turns": ["system RULE-A", "user hi", "assistant yes", "system RULE-B", "user go"],
    "later only": ["user hi", "assistant yes", "developer RULE-A", "user go"],
    "last": ["system RULE-A", "user hi", "system RULE-B"],
    "before a reply": ["system RULE-A", "user hi", "system RULE-B", "assistant yes", "user go"],
    "between messages of the user": ["user hi", "developer RULE-A", "user go"],
    "two in a row": [
        "system RULE-A",
        "user hi",
        "assistant yes",
        "system RULE-B",
        "developer RULE-C",
    ]
    + ["user go"],
    "short": ["system a1", "user b2", "assistant c3", "system d4", "user e5"],
    "said before": ["system RULE-A", "user hi", "assistant yes", "system hi", "user go"],
    "after a result": ["system RULE-A", "user hi", "calls", "tool found", "system RULE-B"],
    "after results, with a reply": ["system RULE-A", "user hi", "calls", "tool found"]
    + ["system RULE-B", "assistant yes", "user go"],
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("turns", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_no_text_is_lost(family: str, turns: list[str]) -> None:
    """Each text is in the prompt as often as in the conversation."""
    messages = made(*turns)
    text = ChatTemplate(FAMILIES[family], TOKENS, "here").render(messages)
    for message in messages:
        if content := message["content"]:
            same = sum(each["content"] == content for each in messages)
            assert text.count(content) == same, text


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in MOVING])
def test_each_prompt_begins_with_the_one_before(family: str) -> None:
    """A later message does not change the start of the prompt, so the prefix cache serves it."""
    template = ChatTemplate(FAMILIES[family], TOKENS, "here")
    turns = ["system RULE-A", "developer RULE-B", "user one", "assistant yes", "system RULE-C"]
    turns += ["user two", "assistant yes", "user three", "developer RULE-D", "assistant yes"]
    turns += ["user four"]
    prompts = [
        template.render(made(*turns[:length]))
        for length in range(3, len(turns) + 1)
        if length == len(turns) or turns[length].startswith("assistant")
    ]
    assert len(prompts) == 4
    for before, after in itertools.pairwise(prompts):
        assert after.startswith(before), (before, after)


def test_messages_are_where_the_template_takes_them() -> None:
    def render(family: str, *turns: str) -> str:
        return ChatTemplate(FAMILIES[family], TOKENS, "here").render(made(*turns))

    later = CONVERSATIONS["between turns"]
    plain = render("Qwen2.5, Qwen3, Granite, Hermes", *later)
    assert plain == (
        "<system>RULE-A</s><user>hi</s><assistant>yes</s><system>RULE-B</s><user>go</s><assistant>"
    )
    folded = "<user>hi</s><assistant>yes</s><user>RULE-B\n\ngo</s><assistant>"
    for family in ("Qwen3.5", "Ministral", "SmolLM3", "Command-R"):
        assert render(family, *later) == "<system>RULE-A</s>" + folded
    assert render("gpt-oss", *later) == "<developer>RULE-A</s>" + folded
    for family in ("Gemma 2", "Phi-3, which knows no system"):
        assert render(family, *later) == folded.replace("hi", "RULE-A\n\nhi")
    two = CONVERSATIONS["instructions and developer"]
    merged = "<system>RULE-A\n\nRULE-B</s><user>hi</s><assistant>"
    for family in ("Qwen3.5", "Ministral", "SmolLM3", "Command-R"):
        assert render(family, *two) == merged
    after = render("Command-R", *CONVERSATIONS["after results, with a reply"])
    assert after.startswith("<system>RULE-A\n\nRULE-B</s>"), "no user's turn is allowed there"


def test_a_template_that_would_lose_a_message_everywhere_refuses() -> None:
    shows_replies = LOOP + "{% if m.role == 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
    takes_none = "{% if 'RULE' in messages | tojson %}{{ raise_exception('no rules') }}{% endif %}"
    for template, words in ((shows_replies, "drops"), (takes_none + shows_replies, "no rules")):
        with pytest.raises(ChatTemplateError, match=words) as caught:
            ChatTemplate(template, TOKENS, "here").render(made("system RULE", "assistant yes"))
        assert caught.value.refused


def test_many_messages_are_folded_in_linear_time() -> None:
    def seconds(count: int) -> float:
        messages = made("user hi", *(f"system {'x' * 50}{at}" for at in range(count)))
        template = ChatTemplate(FAMILIES["Gemma 2"], TOKENS, "here")
        start_s = time.process_time()
        assert template.render(messages).count("x" * 50) == count
        return time.process_time() - start_s

    assert seconds(20_000) < 60 * seconds(1_000) + 1
