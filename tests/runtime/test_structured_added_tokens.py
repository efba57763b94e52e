"""Structured outputs whose text contains that of an added token: `<think>`, `<|endoftext|>`, `<s>`.

The tokenizer encodes such a text as the added token, which has no text for a grammar. The output
still has the text, in plain tokens.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer

from cbatch.core.request.request import FinishReason, StructuredOutputs
from cbatch.core.scheduler.plan import NewSequence
from cbatch.grammars import Grammars
from cbatch.runtime.cpu.drafters.draft_model import DraftModel
from cbatch.runtime.sampling.logits_processors import LogitsProcessors
from cbatch.runtime.sampling.structured import Structured
from cbatch.text import TextTokenizer
from cbatch.text.forced_tools import Function, Tool, forced_call
from tests.runtime.engines import Run, make_request, run_engine, tiny_model
from tests.text.toy_tokenizers import byte_fallback, byte_level

# By the token's field `special`.
ADDED = {True: ["<|im_end|>"], False: ["<think>", "</think>", "<tool_call>"]}


class Vocabulary:
    def __init__(self, raw: Tokenizer, eos: str) -> None:
        raw = Tokenizer.from_str(raw.to_str())
        for special, texts in ADDED.items():
            raw.add_tokens([AddedToken(t, normalized=False, special=special) for t in texts])
        self.tokenizer = TextTokenizer(raw, "toy")
        self.size = self.tokenizer.vocab_size
        self.eos = raw.token_to_id(eos)
        self.added = set(raw.get_added_tokens_decoder())
        self.grammars = Grammars(lambda: self.tokenizer, self.size, (self.eos,))

    def text(self, ids: list[int]) -> str:
        return b"".join(self.tokenizer.token_bytes(i) for i in ids if i != self.eos).decode()


@lru_cache
def vocabulary(kind: str) -> Vocabulary:
    if kind == "byte level":
        return Vocabulary(byte_level(), "<|endoftext|>")
    return Vocabulary(byte_fallback(), "</s>")


def tool_call(**schema: Any) -> StructuredOutputs:
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    parameters["additionalProperties"] = False
    tool = Tool("function", Function("f", parameters=parameters))
    forced = forced_call([tool], "required", parallel=False)
    assert forced is not None
    return forced.output


# The structured outputs, and the pattern of their text.
WAYS: dict[str, tuple[StructuredOutputs, str]] = {
    "choice": (StructuredOutputs(choice=("<think>hi</think>",)), "<think>hi</think>"),
    "regex": (StructuredOutputs(regex="<tool_call>[a-b]{3}"), "<tool_call>[a-b]{3}"),
    "lark": (StructuredOutputs(grammar='start: "a <think>" /[ab]/'), "a <think>[ab]"),
    "gbnf": (StructuredOutputs(grammar='root ::= "<|im_end|>" [ab]'), r"<\|im_end\|>[ab]"),
    "const": (StructuredOutputs(json={"const": "x<|im_end|>"}), r'"x<\|im_end\|>"'),
    "end": (StructuredOutputs(choice=("a <|endoftext|> b",)), r"a <\|endoftext\|> b"),
    "pieces": (StructuredOutputs(choice=("<s> </s><unk>",)), "<s> </s><unk>"),
    "enum": (StructuredOutputs(json={"enum": ["</s>a", "</s>b"]}), '"</s>[ab]"'),
    "name": (
        StructuredOutputs(
            json={
                "type": "object",
                "properties": {"<think>": {"const": 1}},
                "required": ["<think>"],
                "additionalProperties": False,
            }
        ),
        r'\{\s*"<think>"\s*:\s*1\s*\}',
    ),
    "tool": (tool_call(const="</think>"), r'\[\{"name": "f", "arg.*: *\{\s*"a"\s*:\s*"</think>".*'),
}


@pytest.mark.parametrize("kind", ["byte level", "pieces"])
@pytest.mark.parametrize("way", WAYS)
def test_a_text_is_written_in_plain_tokens(way: str, kind: str) -> None:
    """Any choice among the allowed tokens writes it. An added token is never among them, EOS only
    at the end."""
    (outputs, pattern), known = WAYS[way], vocabulary(kind)
    rng = np.random.default_rng(7)
    structured, output = Structured(known.grammars, outputs, known.size), list[int]()
    while known.eos not in output:
        row = torch.zeros(known.size)
        structured.shape(row)
        bits = np.packbits(row.numpy() == 0, bitorder="little")
        assert structured.allowed_bits().tobytes() == bits.tobytes()
        allowed = (row == 0).nonzero()[:, 0].tolist()
        assert allowed and not known.added & set(allowed) - {known.eos}, known.text(output)
        assert all(structured.num_allowed([i]) for i in allowed if i != known.eos)
        output.append(int(rng.choice(allowed)))
        structured.advance(output[-1])
        assert len(output) < 200
    assert re.fullmatch(pattern, known.text(output), re.DOTALL), known.text(output)


# --- through the engine ---------------------------------------------------------------------------


@lru_cache
def draft() -> DraftModel:
    return DraftModel(tiny_model(vocab_size=vocabulary("byte level").size, noise=0.05, seed=1))


def run(*, drafts: bool, **options: Any) -> Run:
    known = vocabulary("byte level")
    batch = [
        make_request(
            way,
            list(range(5, 25)),
            max_tokens=90,
            ignore_eos=False,
            structured_outputs=outputs,
        )
        for way, (outputs, _) in WAYS.items()
    ]
    drafter, model = (draft(), draft().model) if drafts else (None, None)
    settings = {"drafting": drafter, "grammars": known.grammars, "eos_ids": (known.eos,)}
    return run_engine(batch, tiny_model(vocab_size=known.size), model, **settings, **options)


# --- a token that was committed and that the grammar refuses --------------------------------------


@pytest.mark.parametrize("drafts", [False, True])
def test_a_refused_token_that_was_committed_ends_the_request(
    monkeypatch: pytest.MonkeyPatch, drafts: bool
) -> None:
    """As with masks of llguidance itself, the request ends with an error, and no text follows."""
    options: dict[str, Any] = {"lookahead": "fixed:4"} if drafts else {}
    right = run(drafts=drafts, **options)
    for way, (_, pattern) in WAYS.items():
        text = vocabulary("byte level").text(right.outputs[way])
        assert right.reasons[way] is FinishReason.STOP and re.fullmatch(pattern, text, re.DOTALL)
    monkeypatch.setattr(Structured, "_prefer_plain_token", lambda *_: None)
    for depth in (0, 1):
        done = run(drafts=drafts, depth=depth, **options)
        for way, (_, pattern) in WAYS.items():
            if done.reasons[way] is FinishReason.ERROR:
                assert (done.messages[way] or "").startswith("structured_outputs: no token is")
            elif way != "end":  # in that case the mask allows EOS, which ends a text by itself
                text = vocabulary("byte level").text(done.outputs[way])
                assert re.fullmatch(pattern, text, re.DOTALL), text
        assert FinishReason.ERROR in done.reasons.values()


def test_so_does_one_that_a_resumed_request_brings() -> None:
    """After a crash or a preemption the output so far goes through the grammar again."""
    known = vocabulary("byte level")
    processors = LogitsProcessors(1, known.size, known.grammars)
    request = make_request("r", [1, 2], structured_outputs=StructuredOutputs(choice=("<think>",)))
    (think,) = known.tokenizer.encode("<think>")
    for output, alive in ((known.tokenizer.encode("<"), True), ([think], False)):
        tokens = np.array([1, 2, *output])
        processors.admit(
            NewSequence(
                request_id="r",
                slot=0,
                generation=0,
                tokens=tokens,
                num_prompt_tokens=2,
                kv_len_tokens=0,
                draft_kv_len_tokens=0,
                max_total_tokens=20,
                blocks=np.zeros(0, dtype=np.int32),
                params=request.params,
                seed=0,
                choice=0,
                stop_ids=(known.eos,),
            )
        )
        at = np.zeros(1, dtype=np.int64)
        dead = processors.shape_runs(torch.zeros(1, known.size), at, at, at, None)
        assert dead == ({} if alive else {0: 0})
        processors.release(0)
