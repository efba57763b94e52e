"""Thoughts and calls over the API are separate from the answer, and the same streamed or not. The
output of the model is scripted, token by token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from cbatch import LLM
from cbatch.core.request.request import FinishReason
from cbatch.server.protocol.fields import PendingPrompt
from cbatch.server.protocol.requests import parse_chat
from cbatch.text import ChatTemplate
from tests.server.http_client import CHAT, MODEL, Client, serving, serving_service, toy_model
from tests.server.scripted import ScriptedService, tokenizer_with
from tests.test_llm import write_model

MESSAGES: Any = [{"role": "user", "content": "Rome?"}]
TOOLS: Any = [{"type": "function", "function": {"name": "f"}}]
QWEN = tokenizer_with(
    ["<think>", "</think>", "<tool_call>", "</tool_call>"], ["<|im_start|>", "<|im_end|>"]
)
QWEN_TEMPLATE = """\
{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}\
</think>{% endif %}{{ m.content }}{% endfor %}[assistant]
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}"""
R1_TEMPLATE = "{{ messages[0].content }}<|im_start|>assistant\n<think>\n"
HARMONY = tokenizer_with(
    special=[
        *("<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
        *("<|constrain|>", "<|return|>", "<|call|>"),
    ]
)
HARMONY_TEMPLATE = "{{ messages[0].content }}<|start|>assistant{# <|channel|> #}"
MISTRAL = tokenizer_with(special=["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", "[INST]"])
MISTRAL_TEMPLATE = "[INST]{{ messages[0].content }}{# [THINK] #}"


class Model(NamedTuple):
    service: Any
    client: Client
    sdk: openai.OpenAI


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, Model]]:
    with ExitStack() as stack:

        def serve(tokenizer: Any, template: str, **options: Any) -> Model:
            service: Any = ScriptedService(tokenizer)
            chat_template = ChatTemplate(template, {}, "the test")
            options = {"chat_template": chat_template, "reasoning_parser": "auto"} | options
            client = stack.enter_context(serving_service(service, tokenizer, **options))
            url = f"http://127.0.0.1:{client.port}/v1"
            sdk = openai.OpenAI(base_url=url, api_key="-", max_retries=0)
            return Model(service, client, stack.enter_context(sdk))

        yield {
            "qwen": serve(QWEN, QWEN_TEMPLATE, tool_parser="hermes"),
            "r1": serve(QWEN, R1_TEMPLATE),
            "harmony": serve(HARMONY, HARMONY_TEMPLATE),
            "mistral": serve(MISTRAL, MISTRAL_TEMPLATE, tool_parser="mistral"),
            "none": serve(QWEN, QWEN_TEMPLATE, tool_parser="hermes", reasoning_parser="none"),
        }


@pytest.fixture(autouse=True)
def as_ever(models: dict[str, Model]) -> Iterator[None]:
    yield
    for model in models.values():
        model.service.__dict__ = {
            name: model.service.__dict__[name] for name in ("tokenizer", "queue", "model")
        }


CALL = '{"name": "f", "arguments": {"a": 1}}'
TAG = f"<tool_call>{CALL}</tool_call>"
# (model, output, thought with its marks, thought, answer, calls)
REPLIES = [
    ("qwen", "<think>\nHm, ", "<think>\nHm, ", "Hm,", None, 0),
    ("qwen", "<think>\nHm.\n</think>\n\nYes.", "<think>\nHm.\n</think>", "Hm.", "Yes.", 0),
    ("qwen", "<think>\n\n</think>\n\nYes.", "<think>\n\n</think>", None, "Yes.", 0),
    ("qwen", "Yes, in <think> tags.", "", None, "Yes, in <think> tags.", 0),
    ("qwen", f"<think>{TAG}</think>{TAG}", f"<think>{TAG}</think>", TAG, None, 1),
    ("qwen", "", "", None, "", 0),
    ("r1", "Hm.</think>Yes.", "Hm.</think>", "Hm.", "Yes.", 0),
    ("r1", "Hm", "Hm", "Hm", None, 0),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        "<|message|>Hm.<|end|>",
        "Hm.",
        "Yes.",
        0,
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
        "<|message|>Hm.<|end|>",
        "Hm.",
        None,
        1,
    ),
    (
        "mistral",
        '[THINK]Hm.[/THINK]I look.[TOOL_CALLS]f[ARGS]{"a": 1}',
        "[THINK]Hm.[/THINK]",
        "Hm.",
        "I look.",
        1,
    ),
]


def ask(model: Model, *, stream: bool, **more: Any) -> Any:
    """Return the completion as the `openai` package assembles it."""
    fields = {"model": MODEL, "messages": MESSAGES, **more}
    if not stream:
        return model.sdk.chat.completions.create(**fields)
    fields["stream_options"] = {"include_usage": True}
    with model.sdk.chat.completions.stream(**fields) as events:
        try:
            return events.get_final_completion()
        except openai.LengthFinishReasonError as error:
            return error.completion


def thought_of(message: Any) -> str | None:
    extra = message.model_extra or {}
    assert extra.get("reasoning") == extra.get("reasoning_content")
    return extra.get("reasoning")


@pytest.mark.parametrize(("step_tokens", "late"), [(1, False), (4, True), (500, False)])
@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: f"{reply[0]} {reply[1][:20]!r}")
def test_the_package_reads_thoughts_whole_and_streamed(
    models: dict[str, Model], reply: Any, step_tokens: int, late: bool
) -> None:
    name, text, with_marks, thought, content, calls = reply
    model = models[name]
    service = model.service
    service.text, service.step_tokens, service.late = text, step_tokens, late
    for stream in (False, True):
        answer = ask(model, stream=stream, n=2, tools=TOOLS if calls else openai.omit)
        for choice in answer.choices:
            assert thought_of(choice.message) == thought
            assert (choice.message.content or None) == (content or None)
            arguments = [call.function.arguments for call in choice.message.tool_calls or []]
            assert arguments == ['{"a": 1}'] * calls
            assert choice.finish_reason == ("tool_calls" if calls else "stop")
        details = answer.usage.completion_tokens_details
        end = thought is not None and content is None and not calls  # EOS ends the thought
        want = len(service.tokenizer.encode(with_marks)) + end
        assert details.reasoning_tokens == 2 * want, "reasoning tokens"


BODY: Any = {"messages": MESSAGES, "tools": TOOLS}


def test_a_truncated_call_is_text_and_reports_length(models: dict[str, Model]) -> None:
    service, client, _ = models["none"]
    service.reason = FinishReason.LENGTH
    for text, calls in ((TAG[:-20], 0), (f"{TAG}\n{TAG[:-20]}", 1)):
        service.text = text
        (choice,) = client.post(BODY, CHAT)[1]["choices"]
        assert choice["finish_reason"] == "length" and "<tool_call>" in choice["message"]["content"]
        assert len(choice["message"].get("tool_calls", [])) == calls


def test_events_of_a_call(models: dict[str, Model]) -> None:
    """Text comes at once, a call in one piece; the first event has the role."""
    service, client, _ = models["none"]
    service.text = f"Hold on. {TAG}{TAG}"
    deltas = [e["choices"][0]["delta"] for e in client.stream(BODY, CHAT)]
    assert deltas[:2] == [{"content": "Hol", "role": "assistant"}, {"content": "d o"}]
    assert "".join(delta.get("content", "") for delta in deltas) == "Hold on."
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [(call["index"], call["type"]) for call in calls] == [(0, "function"), (1, "function")]
    for change in ({"tool_choice": "none"}, {"tools": []}):
        service.text = TAG
        (choice,) = client.post(BODY | change, CHAT)[1]["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (TAG, "stop")


def test_thoughts_are_streamed_under_both_names(models: dict[str, Model]) -> None:
    model = models["qwen"]
    model.service.text, model.service.step_tokens = "<think>\nOne two\n</think>\n\nYes", 1
    deltas = [e["choices"][0]["delta"] for e in model.client.stream({"messages": MESSAGES}, CHAT)]
    assert deltas[0] == {"role": "assistant", "reasoning": "O", "reasoning_content": "O"}
    texts = [delta.get("reasoning") or delta.get("content", "") for delta in deltas]
    assert texts == [*"One", " t", "w", "o", *"Yes", ""], "one event per token"
    assert all(len({"reasoning", "content"} & delta.keys()) <= 1 for delta in deltas)
    _, whole, _ = model.client.post({"messages": MESSAGES}, CHAT)
    message = whole["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "One two"


@pytest.mark.parametrize("stream", [False, True])
def test_without_thinking_the_template_closes_the_thought(
    models: dict[str, Model], stream: bool
) -> None:
    model = models["qwen"]
    model.service.text = "Yes, </think> and all."
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = ask(model, stream=stream, extra_body=off)
    assert answer.choices[0].message.content == "Yes, </think> and all."
    assert thought_of(answer.choices[0].message) is None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_can_be_left_out_or_left_in(models: dict[str, Model], stream: bool) -> None:
    model = models["qwen"]
    model.service.text = "<think>Hm.</think>\n\nYes."
    answer = ask(model, stream=stream, extra_body={"include_reasoning": False})
    message = answer.choices[0].message
    assert (message.content, thought_of(message)) == ("Yes.", None)
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0
    answer = ask(model, stream=stream, extra_body={"separate_reasoning": False})
    assert answer.choices[0].message.content == model.service.text
    assert answer.usage.completion_tokens_details is None
    # A call in a thought does not count, even if the thought is part of the text.
    model.service.text = f"<think>{TAG}</think>Yes."
    for other in (model, models["none"]):
        other.service.text = model.service.text
        raw = {"separate_reasoning": False} if other is model else {}
        answer = ask(other, stream=stream, tools=TOOLS, extra_body=raw)
        message = answer.choices[0].message
        assert (message.content, message.tool_calls) == (model.service.text, None)


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_can_be_truncated(models: dict[str, Model], stream: bool) -> None:
    model = models["qwen"]
    model.service.text, model.service.reason = "<think>Hm, let me", FinishReason.LENGTH
    (choice,) = ask(model, stream=stream).choices
    assert (choice.finish_reason, choice.message.content) == ("length", None)
    assert thought_of(choice.message) == "Hm, let me"
    # Stop strings count everywhere in a reply, as in vLLM.
    model.service.text, model.service.reason = "<think>Hm, STOP not</think>x", FinishReason.STOP
    for step_tokens in (1, 50):
        model.service.step_tokens = step_tokens
        answer = ask(model, stream=stream, stop="STOP")
        (choice,) = answer.choices
        assert (choice.finish_reason, choice.message.content) == ("stop", None)
        assert thought_of(choice.message) == "Hm,"
        want = len(QWEN.encode("<think>Hm, STOP"))
        assert answer.usage.completion_tokens == want
        assert answer.usage.completion_tokens_details.reasoning_tokens == want


def test_each_usage_chunk_counts_the_thought_so_far(models: dict[str, Model]) -> None:
    model = models["qwen"]
    model.service.text, model.service.step_tokens = "<think>Hmm</think>Yes", 2
    options = {"continuous_usage_stats": True, "include_usage": True}
    events = model.client.stream({"messages": MESSAGES, "stream_options": options}, CHAT)
    counts = [each["usage"]["completion_tokens_details"]["reasoning_tokens"] for each in events]
    assert counts == sorted(counts) and counts[-1] == 5 > counts[0] > 0


def prompt(model: Any, **body: Any) -> str:
    call = parse_chat(json.dumps({"messages": MESSAGES} | body).encode(), model)
    (pending,) = call.prompts
    assert isinstance(pending, PendingPrompt)
    return model.tokenizer.decode(list(pending.make()), skip_special_tokens=False)


def test_earlier_thoughts_are_sent_in_the_form_of_the_template() -> None:
    model = toy_model(QWEN_TEMPLATE, tokenizer=QWEN, reasoning_parser="auto")
    off = prompt(model, chat_template_kwargs={"enable_thinking": False})
    assert off.endswith("[assistant]\n<think>\n\n</think>\n\n")
    # gpt-oss reads `thinking`, and refuses it together with calls that have content.
    oss = toy_model("{% for m in messages %}{{ m.thinking }};{% endfor %}", tokenizer=QWEN)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    earlier = {"role": "assistant", "reasoning": "Hm.", "tool_calls": [call]}
    both = [{**earlier, "content": None}, {**earlier, "content": "I look."}]
    assert prompt(oss, messages=both) == "Hm.;;"


# ---- requests to the engine ----------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
WAYS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "[0-9]+"}},
    {"tools": TOOLS, "tool_choice": "required"},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: str(way)[:40])
def test_a_structured_answer_begins_after_the_thought(
    models: dict[str, Model], way: dict[str, Any]
) -> None:
    body = {"messages": MESSAGES, **way}
    around = {}
    for name, model in models.items():
        model.service.text = "x"
        status, answer, _ = model.client.post(body, CHAT)
        assert status == 200, answer
        around[name] = model.service.params.structured_outputs.around
    assert around["none"] is None
    assert all("@answer" in around[name] for name in ("qwen", "r1", "harmony", "mistral"))
    qwen = models["qwen"]
    qwen.client.post(body | {"chat_template_kwargs": {"enable_thinking": False}}, CHAT)
    assert qwen.service.params.structured_outputs.around is None
    own = "start: @answer"
    if "structured_outputs" in way:
        given = {"structured_outputs": way["structured_outputs"] | {"around": own}}
        qwen.client.post(body | given, CHAT)
        assert qwen.service.params.structured_outputs.around == own


# ---- with an engine ------------------------------------------------------------------------------


def test_an_engine_begins_the_answer_where_the_thought_ends(tmp_path: Path) -> None:
    """The models are random. A logit bias makes the thoughts end."""
    target, small = (
        write_model(tmp_path / name, tokenizer=QWEN.raw, layers=layers)
        for name, layers in (("target", 2), ("draft", 1))
    )
    llm = LLM(target, small, random_weights_seed=0, numerics="invariant", lookahead="fixed:3")
    (closes,) = QWEN.encode("</think>")
    fields = {"structured_outputs": {"regex": "[0-9]{3}|no"}, "logit_bias": {closes: 2.5}, "n": 4}
    body = {"messages": MESSAGES, "max_tokens": 60, "seed": 3, "return_token_ids": True} | fields
    template = ChatTemplate(R1_TEMPLATE, {}, "the test")
    with serving(llm.engine, chat_template=template, reasoning_parser="auto") as client:
        status, whole, _ = client.post(body, CHAT)
        assert status == 200, whole
        streamed = client.stream(body | {"stream_options": {"include_usage": True}}, CHAT)
        _, raw, _ = client.post(body | {"separate_reasoning": False}, CHAT)
    texts = [{"content": "", "reasoning": ""} for _ in range(4)]
    for event in streamed:
        for choice in event["choices"]:
            for name, text in texts[choice["index"]].items():
                texts[choice["index"]][name] = text + choice["delta"].get(name, "")
    thinking, ended = 0, 0
    for choice, shown, left in zip(whole["choices"], texts, raw["choices"], strict=True):
        message, ids = choice["message"], choice["token_ids"]
        assert shown == {name: message[name] or "" for name in shown}
        assert left["message"]["content"] == QWEN.decode(ids), "the text includes the marks"
        thinking += ids.index(closes) + 1 if closes in ids else len(ids)
        if choice["finish_reason"] == "stop":
            ended += 1
            assert re.fullmatch("[0-9]{3}|no", message["content"]) and message["reasoning"]
    assert ended >= 2, "the thoughts did not end"
    details = {"reasoning_tokens": thinking}
    assert whole["usage"]["completion_tokens_details"] == details
    assert streamed[-1]["usage"]["completion_tokens_details"] == details
