"""Whole engines on tiny models with recurrent layers: texts equal those of a quiet engine, whatever
happens to their state pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cbatch import LLM, FieldError, SamplingParams
from cbatch.llm import Completion
from cbatch.runtime.model.config import ModelError
from tests.test_llm import HYBRIDS, write_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    kinds = {"llama": None, **dict(zip(HYBRIDS, HYBRIDS, strict=True))}
    return {name: write_model(folder / name, hybrid=kind) for name, kind in kinds.items()}


def make(models: dict[str, Path], family: str, **options: Any) -> LLM:
    settings = {"max_num_seqs": 4, "random_weights_seed": 0, "num_blocks": 128}
    return LLM(models[family], **settings | options)


SHARED = "A river begins in the hills, and "
PROMPTS = [
    *(SHARED + text for text in ("runs to the sea.", "turns", "runs to the lake, " * 4, "turns")),
    *("abc " * 20, "a", "for x in range(10): print(x)\n" * 3),
]
PARAMS = [
    SamplingParams(max_tokens=40 + 3 * i, temperature=i % 2, seed=i, ignore_eos=True)
    for i in range(len(PROMPTS))
]
RECURRENT = pytest.mark.parametrize("family", HYBRIDS)


def tokens(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    assert [each.error for each in completions] == [None] * len(completions)
    return [each.token_ids for each in completions]


@RECURRENT
def test_texts_do_not_depend_on_what_happens_to_pages(models: dict[str, Path], family: str) -> None:
    quiet = make(models, family, max_num_seqs=1, enable_prefix_caching=False)
    expected = tokens([quiet.generate(p, q)[0] for p, q in zip(PROMPTS, PARAMS, strict=True)])
    for options in (
        {"num_state_pages": 60, "state_interval": 1},
        {"num_state_pages": 7, "max_num_batched_tokens": 32},
        {"num_blocks": 20, "num_state_pages": 12, "block_size": 8, "drafter": ("ngram",)},
        {"drafter": ("suffix",), "lookahead": "fixed:6", "overlap": 1, "block_size": 4},
        {"draft": models["llama"], "lookahead": "fixed:5", "block_size": 4, "num_blocks": 36},
    ):
        llm = make(models, family, **options)
        for _ in range(2):
            assert tokens(llm.generate(PROMPTS, PARAMS)) == expected, options
        stats = llm.engine.scheduler.stats
        assert stats.prefix_hit_tokens > 0
        if options.get("num_blocks") in (20, 36):
            assert stats.preemptions > 0
        if "draft" in options:
            assert stats.drafted_tokens > stats.accepted_tokens


@RECURRENT
@pytest.mark.parametrize("drafter", [None, ("ngram",)])
def test_a_second_turn_computes_its_new_tokens(
    models: dict[str, Path], family: str, drafter: tuple[str, ...] | None
) -> None:
    llm, block_size = make(models, family, drafter=drafter, block_size=8, state_interval=64), 8
    params = SamplingParams(max_tokens=15, temperature=0, ignore_eos=True)
    fresh = make(models, family, enable_prefix_caching=False)
    conversation = list(llm.engine.tokenizer.encode(PROMPTS[0]))  # type: ignore[union-attr]
    computed = 0
    for turn in range(3):
        stats = llm.engine.scheduler.stats
        before = stats.prefix_hit_tokens
        (answer,) = llm.generate(conversation, params)
        assert stats.prefix_hit_tokens - before == computed // block_size * block_size
        assert answer.token_ids == fresh.generate(conversation, params)[0].token_ids
        conversation += answer.token_ids
        computed = len(conversation) - 1  # the last token is not in KV
        conversation += [5 + turn, 6, 7]
    metrics = [each.engine.core.metrics() for each in (llm, make(models, "llama"))]
    pages = llm.engine.scheduler.config.num_state_pages
    assert [(each.state_pages, each.used_state_pages) for each in metrics] == [
        (pages, 0),
        (None, None),
    ]


@pytest.mark.parametrize(
    ("family", "options", "problem"),
    [
        ("llama", {"state_interval": 4}, "state_interval: would be ignored"),
        ("llama", {"draft": "lfm2"}, "draft: .*recurrent layers are not supported in a draft"),
        ("lfm2", {"tensor_parallel_size": 2}, "cannot be sharded over ranks; use device cpu and"),
        ("lfm2", {"num_state_pages": 1}, "num_state_pages: 1 cannot hold .*; give 2 or more"),
    ],
)
def test_refusals(
    models: dict[str, Path], family: str, options: dict[str, Any], problem: str
) -> None:
    if "draft" in options:
        options = {"draft": models[options["draft"]]}
    with pytest.raises((FieldError, ModelError), match=problem):
        make(models, family, **options)
