"""Gemma 3 270M as the package index has it: a real file of a family that is not like Llama."""

from __future__ import annotations

import json

from cbatch import LLM, SamplingParams, StructuredOutputs
from tests.smollm2 import needs_gemma3

PROMPT = (
    "def fib(n):\n    if n == 0:\n        return 0\n    elif n == 1:\n        return 1\n    elif n"
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}


@needs_gemma3
def test_texts_drafts_schemas_and_chats() -> None:
    llm = LLM("gemma3-270m", drafter=("suffix", "ngram"), lookahead="fixed:3", max_model_len=512)
    greedy = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    params = [greedy, SamplingParams(max_tokens=24, temperature=0, max_lookahead=0)]
    drafted, plain = llm.generate([PROMPT, PROMPT], params)
    assert drafted.text == plain.text and plain.text.startswith(" == 2:\n        return ")
    assert drafted.speculation.mean_accepted_tokens > 0
    shaped = SamplingParams(
        max_tokens=40, temperature=0, structured_outputs=StructuredOutputs(json=SCHEMA)
    )
    (answer,) = llm.generate(["Paris as JSON: "], shaped)
    assert json.loads(answer.text).keys() == {"city", "big"}
    (reply,) = llm.chat([{"role": "user", "content": "Name a colour."}], greedy)
    assert reply.text and "<start_of_turn>" not in reply.text
