"""T6: whole engines give the same texts equally often with and without speculation.

Two samples are compared, so nothing is assumed about the model. Run by `make test-statistics`; the
small joint law that every test run checks is in `tests/runtime/test_statistics.py`. Seeds are
fixed; error rates are given where they are not those of |z| < 5, 6 in 10 million.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cbatch import LLM, SamplingParams
from cbatch.runtime.cpu.drafters import draft_model as drafter

pytestmark = pytest.mark.statistics

VOCAB, LENGTH = 24, 12
NONE = VOCAB  # after the end of a sequence
PARAMS: dict[str, Any] = {
    "max_tokens": LENGTH,
    "temperature": 0.1,
    "top_k": 14,
    "top_p": 0.95,
    "min_p": 0.02,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
    "logit_bias": {3: -0.3, 9: 0.2},
    "banned_token_ids": (5,),
    "stop_token_ids": (7,),
    "min_tokens": 3,
}
NEUTRAL: dict[str, Any] = {  # filters alone: shaping by penalties costs a loop over rows
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "banned_token_ids": (),
    "min_tokens": 0,
}
Z_BOUND = 5.0
MODES = pytest.mark.parametrize("mode", ["rejection", "coupled"])


def write_model(folder: Path, layers: int, hidden: int) -> Path:
    """Write a configuration without weights: they are drawn when it is loaded."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LLM]:
    """Return an engine with a given lookahead. The draft is another model, not a part of the
    target."""
    folder = tmp_path_factory.mktemp("models")
    pair = write_model(folder / "target", 2, 32), write_model(folder / "draft", 1, 24)
    torch.set_num_threads(1)

    def load(lookahead: str) -> LLM:
        return LLM(
            *pair,
            tokenizer="none",
            random_weights_seed=0,
            numerics="invariant",
            max_num_seqs=128,
            max_num_batched_tokens=4096,
            lookahead=lookahead,
        )

    return load


def sample(
    llm: LLM, prompts: list[list[int]], num_choices: int, seed: int, **params: Any
) -> np.ndarray:
    """Return the tokens of `num_choices` choices for every prompt: int64 [prompts, num_choices,
    LENGTH]."""
    settings = PARAMS | params
    completions = llm.generate(
        prompts,
        [SamplingParams(n=num_choices, seed=seed + i, **settings) for i in range(len(prompts))],
    )
    out = np.full((len(prompts), num_choices, LENGTH), NONE)
    for i, completion in enumerate(completions):
        assert completion.error is None
        for choice in completion.choices:
            out[i, choice.index, : len(choice.token_ids)] = choice.token_ids
    return out


def speculated(llm: LLM) -> None:
    """Check that drafts were accepted, rejected, and verified in runs of several."""
    seen = llm.engine.stats.speculation
    assert 0.2 < seen.accepted_tokens / (seen.accepted_tokens + seen.rejections) < 0.95
    assert seen.rejections > 1000 and seen.k_histogram.get(3, 0) > 1000


def two_sample_z(a: np.ndarray, b: np.ndarray) -> float:
    """Return z of the homogeneity of two equally large samples of cells, pooled below 10 a cell.

    Given their sum, a cell's counts are binomial with chance one half; with m cells the sum of
    (a - b)**2 / (a + b) is chi-square with m - 1 degrees of freedom.
    """
    size = max(int(a.max()), int(b.max())) + 1
    x, y = np.bincount(a, minlength=size), np.bincount(b, minlength=size)
    rare = x + y < 10
    x, y = (np.append(c[~rare], c[rare].sum()).astype(float) for c in (x, y))
    kept = x + y > 0
    statistic = float(((x - y)[kept] ** 2 / (x + y)[kept]).sum())
    df = int(kept.sum()) - 1
    scale = 2 / (9 * df)
    return float(((statistic / df) ** (1 / 3) - (1 - scale)) / np.sqrt(scale))


def pair_zs(a: np.ndarray, b: np.ndarray) -> list[float]:
    """Return z of the first token, and of pairs of tokens at the first places, for samples
    [num_choices, LENGTH]."""

    def cells(tokens: np.ndarray) -> list[np.ndarray]:
        pairs = [tokens[:, i] * (VOCAB + 1) + tokens[:, i + 1] for i in range(4)]
        return [tokens[:, 0], *pairs]

    return [two_sample_z(x, y) for x, y in zip(cells(a), cells(b), strict=True)]


@pytest.fixture(scope="module", params=[False, True], ids=["filters", "filters and penalties"])
def pairs_case(request: pytest.FixtureRequest, make: Callable[[str], LLM]) -> dict[str, Any]:
    """Return samples of two prompts, 10 000 choices each (3000 with penalties) by plain decoding,
    at the temperature under test and at a higher one."""
    prompts, num_choices = [[4, 8, 2], [11, 3, 20, 20, 9]], 3000 if request.param else 10_000
    params = {"max_tokens": 5, "temperature": 0.25} | ({} if request.param else NEUTRAL)
    plain = sample(make("off"), prompts, num_choices, seed=100, **params)
    warmer = sample(make("off"), prompts, num_choices, seed=300, **(params | {"temperature": 0.4}))
    return {
        "prompts": prompts,
        "num_choices": num_choices,
        "params": params,
        "plain": plain,
        "warmer": warmer,
    }


@MODES
def test_t6_first_tokens_and_pairs(
    make: Callable[[str], LLM], pairs_case: dict[str, Any], mode: str
) -> None:
    """Speculation is compared with plain decoding with other seeds."""
    engine, plain = make("fixed:3"), pairs_case["plain"]
    prompts, num_choices, params = (
        pairs_case[name] for name in ("prompts", "num_choices", "params")
    )
    drafted = sample(engine, prompts, num_choices, seed=200, verification=mode, **params)
    speculated(engine)
    for i in range(len(prompts)):
        assert max(abs(z) for z in pair_zs(plain[i], drafted[i])) < Z_BOUND
        assert max(pair_zs(pairs_case["warmer"][i], drafted[i])) > 2 * Z_BOUND


def permutation_p(a: np.ndarray, b: np.ndarray, seed: int) -> float:
    """Return the p-value of MMD with the Hamming kernel between samples [prompts, num_choices,
    LENGTH].

    Labels are permuted within each prompt 1000 times (Gao, Liang, Guestrin 2024, "Model equality
    testing", arXiv 2410.20247). The kernel counts the places where two sequences agree. The squared
    MMD of a prompt is therefore the squared distance between the frequencies of tokens, summed over
    places.
    """
    rng = np.random.default_rng(seed)
    statistics = np.zeros(1001)
    for x, y in zip(a, b, strict=True):
        one_hot = np.eye(VOCAB + 1, dtype=np.float32)[np.concatenate([x, y])]
        signs = np.repeat(np.array([1, -1], dtype=np.float32), len(x))
        rows = np.stack([signs, *(rng.permutation(signs) for _ in range(1000))])
        statistics += ((rows @ one_hot.reshape(2 * len(x), -1)) ** 2).sum(axis=1)
    return float((statistics >= statistics[0]).mean())


def report_raw_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: drafts come from the filtered q; the q reported is without temperature and
    filters."""
    filtered: list[torch.Tensor] = []

    def raw(logits: torch.Tensor, filters: Any) -> torch.Tensor:
        filtered.append(original_filter(logits, filters))
        return logits.softmax(dim=-1)

    def draw(q: torch.Tensor, *args: Any) -> torch.Tensor:
        return original_draw(filtered.pop(), *args)

    original_filter, original_draw = drafter.filtered_probs, drafter.draw
    monkeypatch.setattr(drafter, "filtered_probs", raw)
    monkeypatch.setattr(drafter, "draw", draw)


@MODES
def test_t6_mmd_of_whole_outputs(
    make: Callable[[str], LLM], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """25 prompts, 40 outputs each, are compared with plain decoding: p >= 0.01 (wrong in 1 of 100
    seeds, and this one is fixed). Another temperature is noticed, and so is a raw q."""
    rng = np.random.default_rng(6)
    prompts = [rng.integers(1, VOCAB, rng.integers(1, 20)).tolist() for _ in range(25)]
    engine = make("fixed:3")
    plain = sample(make("off"), prompts, 40, seed=1000)
    assert permutation_p(plain, sample(engine, prompts, 40, 2000, verification=mode), 1) >= 0.01
    speculated(engine)
    warmer = sample(make("off"), prompts, 40, seed=3000, temperature=0.14)
    assert permutation_p(plain, warmer, 2) < 0.01
    if mode == "rejection":
        report_raw_q(monkeypatch)
        broken = sample(make("fixed:3"), prompts, 40, 4000, verification=mode)
        assert permutation_p(plain, broken, 3) < 0.01
