"""The same text streamed, in one response and from Python, with incomplete characters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from cbatch import LLM, SamplingParams
from tests.server.apis import COMPLETIONS, ask
from tests.server.http_client import serving
from tests.test_llm import write_model
from tests.text.toy_tokenizers import byte_level

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
