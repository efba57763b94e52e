"""The grammar of a thought and a structured answer, by tokens and by text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cbatch.core.request.request import StructuredOutputs
from cbatch.grammars import Grammars
from cbatch.runtime.sampling.structured import Structured
from cbatch.text import TextTokenizer
from cbatch.text.chat_format import surrounding_grammar
from cbatch.text.tool_parsers import THOUGHTS
from tests.server.scripted import EOS, QWEN, tokenizer_with

PLAIN = tokenizer_with()  # marks are text
HARMONY = tokenizer_with(
    special=["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"]
)
MISTRAL = tokenizer_with(special=["[THINK]", "[/THINK]", "[TOOL_CALLS]"])
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"json": SCHEMA | {"additionalProperties": False}}, '{"a": 1}', '{"b": 1}'),
    ({"regex": "[0-9]{2}"}, "42", "4a"),
    ({"choice": ("yes", "no")}, "yes", "maybe"),
    ({"grammar": 'root ::= "ja" | "nein"'}, "nein", "na"),
]
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
# (format, tokenizer, end of the prompt, allowed beginnings before the answer, forbidden ones)
CASES: list[tuple[str, TextTokenizer, str, list[str], list[str]]] = [
    (
        "qwen3",
        QWEN,
        "[assistant]\n",
        ["", "<think>Hm</think>", "<think>\n{a <tool_call> 1}\n</think>\n\n", "<think></think>\n"],
        ["Hm</think>", "</think>", "Hm", "<think>Hm", "<think>a</think>\n\n\n", "\n"],
    ),
    (
        "qwen3",
        PLAIN,
        "[assistant]\n",
        ["", "<think>Hm</thinker></think>", "<think>\n{}\n</think>\n\n"],
        ["Hm</think>", "<think>Hm"],
    ),
    (
        "deepseek_r1",
        QWEN,
        "[assistant]<think>\n",
        ["Hm</think>", "</think>\n\n", "<think>{}</think>", "a<tool_call>b</tool_call></think>"],
        ["", "Hm", "Hm</think>x"],
    ),
    ("deepseek_r1", QWEN, "[assistant]", ["Hm</think>", "<think>Hm</think>"], [""]),
    ("deepseek_r1", PLAIN, "<think>", ["Hm, </thin </think>"], ["Hm, </think"]),
    ("mistral", MISTRAL, "[/INST]", ["", "[THINK]Hm[/THINK]"], ["Hm", "Hm[/THINK]"]),
    (
        "harmony",
        HARMONY,
        "<|start|>assistant",
        [FINAL, f"{ANALYSIS}Hm {{}}<|end|><|start|>assistant{FINAL}"],
        ["", ANALYSIS, f"{ANALYSIS}Hm<|end|>", f"{ANALYSIS}Hm<|end|>{FINAL}"],
    ),
]


def matcher_of(tokenizer: TextTokenizer, outputs: StructuredOutputs) -> Any:
    return Grammars(lambda: tokenizer, tokenizer.vocab_size, (EOS,)).matcher(outputs)


def takes(matcher: Any, tokenizer: TextTokenizer, text: str) -> bool:
    """Return True if the whole reply may be `text`."""
    fresh, ids = matcher.deep_copy(), tokenizer.encode(text)
    return fresh.try_consume_tokens(ids) == len(ids) and fresh.is_accepting()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[2]!r}")
@pytest.mark.parametrize("way, right, wrong", FIELDS, ids=lambda fields: str(fields)[:20])
def test_the_answer_follows_its_grammar_after_the_thought(
    case: Any, way: dict[str, Any], right: str, wrong: str
) -> None:
    name, tokenizer, prompt_end, before, never = case
    around = surrounding_grammar(THOUGHTS[name], tokenizer, prompt_end)
    matcher = matcher_of(tokenizer, StructuredOutputs(**way, around=around))
    for text in before:
        assert takes(matcher, tokenizer, text + right), text
        assert not takes(matcher, tokenizer, text + wrong)
        assert not takes(matcher, tokenizer, text)
        assert not takes(matcher, tokenizer, f"{text}{right}x")
    for text in never:
        assert not takes(matcher, tokenizer, text + right), text


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
    assert (
        surrounding_grammar(thoughts, QWEN, f"x{thoughts.open_mark}\n\n{thoughts.close_mark}\n\n")
        is None
    )
