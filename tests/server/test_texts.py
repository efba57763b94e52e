"""The same text streamed, in one response and from Python, also with special tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from cbatch import LLM, SamplingParams
from tests.chained_model import byte_tokens, write_chained
from tests.server.apis import CHAT, COMPLETIONS, ask
from tests.server.engines import FIRST_CONTENT
from tests.server.http_client import serving
from tests.test_llm import write_model
from tests.text.toy_tokenizers import byte_level

TEXT = "qhi<|im_end|>\n<|im_start|>x.y"  # the tokens after the prompt "q", each once
INCLUDED = {"include_stop_str_in_output": True}
SHOWN = {"skip_special_tokens": False}
# Fields, text, finish reason, number of tokens.
CASES: list[tuple[dict[str, Any], str, str, int]] = [
    ({}, "hi\nx.y", "length", 8),
    (SHOWN, TEXT[1:], "length", 8),
    ({"stop": "<|im_end|>"}, "hi", "stop", 3),
    ({"stop": ["nothing", "i<|im_end|>\n"]}, "h", "stop", 4),
    ({"stop": ["<|im_start|>x", "."]}, "hi\n", "stop", 6),
    ({"stop": "<|im_end|>"} | SHOWN, "hi", "stop", 3),
    ({"stop": "<|im_end|>"} | INCLUDED, "hi<|im_end|>", "stop", 3),
    ({"stop": "x."} | INCLUDED, "hi\nx.", "stop", 7),
    ({"stop": "i\nx"}, "h", "stop", 6),  # as shown in the text
    ({"stop": "i\nx"} | SHOWN, TEXT[1:], "length", 8),
    ({"stop_token_ids": [ord(".")]}, "hi\nx", "stop", 7),
    ({"stop_token_ids": [ord(".")]} | INCLUDED, "hi\nx.", "stop", 7),
    ({"stop_token_ids": [258]} | SHOWN, "hi", "stop", 3),
    ({"stop_token_ids": [258]} | SHOWN | INCLUDED, "hi<|im_end|>", "stop", 3),
    ({"skip_special_tokens": True, "spaces_between_special_tokens": False}, "hi\nx.y", "length", 8),
]


def test_special_tokens_and_stops(tmp_path: Path) -> None:
    raw = byte_tokens()
    write_chained(tmp_path / "model", raw, raw.encode(TEXT).ids, eos=256)
    llm, other = (LLM(tmp_path / "model", num_blocks=64, max_num_seqs=4) for _ in range(2))
    with serving(other.engine, chat_template=FIRST_CONTENT) as client:
        for number, (fields, text, reason, count) in enumerate(CASES):
            # Ids of bytes are in the order of their names, which is not that of the bytes.
            ids = fields.get("stop_token_ids", [])
            ids = [i if i > 255 else raw.encode(chr(i)).ids[0] for i in ids]
            given = fields | {"stop_token_ids": ids, "max_tokens": 8, "temperature": 0}
            path = (COMPLETIONS, CHAT)[number % 2]
            prompt = {"messages": [{"role": "user", "content": "q"}]}
            body = given | (prompt if path == CHAT else {"prompt": "q"})
            for stream in (False, True):
                reply = ask(client, path, body, stream=stream)
                assert (reply.text, reply.reason) == (text, reason), fields
                assert reply.body["usage"]["completion_tokens"] == count
            if isinstance(given.get("stop"), str):
                given["stop"] = (given["stop"],)
            (done,) = llm.generate("q", SamplingParams(n=2, **given))
            for choice in done.choices:
                assert (choice.text, choice.finish_reason.value) == (text, reason)
                assert len(choice.token_ids) == count


SCRIPTS = [
    "def f(x):\n    return",
    "class Жук:\n    ",
    "# 日本語のコメント\n",
    "名前 = '한국어'\n",
    "print('مرحبا بالعالم')\n",
    "# नमस्ते दुनिया ",
    "😀 = '👩‍👩‍👧‍👦🏳️‍🌈'\n",
    "é\u0301\u200d\ufeff ∑∫ℝ\n",
    "x = '\u00a0\t\u2028'\n",
    "ǅ ﷽ 𝔘𝔫𝔦 𒐫\n",
]
PROMPTS = [f"{text}{number}" for number in range(6) for text in SCRIPTS]


def params_of(at: int) -> dict[str, Any]:
    """Return parameters: greedy, sampled, and with a temperature so high that characters are
    incomplete."""
    temperature = (0.0, 0.8, 2.5)[at % 3]
    return {"max_tokens": 12, "temperature": temperature, "seed": at, "stop": ["\n\n\n"]}


def test_sixty_prompts(tmp_path: Path) -> None:
    """Weights are random, over a byte-level vocabulary: many characters are incomplete."""
    model = write_model(tmp_path / "model", tokenizer=byte_level())
    options: dict[str, Any] = {"numerics": "invariant", "lookahead": "fixed:3"}
    options |= {"max_num_seqs": 32, "random_weights_seed": 0, "drafter": ("ngram",)}
    served, reference = (LLM(model, **options) for _ in range(2))
    bodies = [{"prompt": prompt, **params_of(at)} for at, prompt in enumerate(PROMPTS)]
    with serving(served.engine) as client, ThreadPoolExecutor(32) as pool:
        whole, streamed = (
            [*pool.map(partial(ask, client, COMPLETIONS, stream=stream), bodies)]
            for stream in (False, True)
        )
    params = [SamplingParams(**params_of(at)) for at in range(len(PROMPTS))]
    completions = reference.generate(PROMPTS, params)
    for want, *replies in zip(completions, whole, streamed, strict=True):
        for reply in replies:
            assert (reply.text, reply.reason) == (want.text, want.finish_reason.value)
            usage = reply.body["usage"]
            assert usage["prompt_tokens"] == len(want.prompt_token_ids)
            assert usage["completion_tokens"] == len(want.token_ids)
            assert usage["total_tokens"] == len(want.prompt_token_ids) + len(want.token_ids)
    broken = sum("\ufffd" in each.text for each in completions)
    kept = sum(any(ord(c) > 127 and c != "\ufffd" for c in each.text) for each in completions)
    assert broken > 10 and kept > 5, (broken, kept)
    assert sum(c.speculation.accepted_tokens for c in completions) > 5
