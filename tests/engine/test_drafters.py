"""Drafters chosen when an engine is loaded, and by each request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from cbatch import LLM, EngineOptions, FieldError, SamplingParams
from cbatch.core.prices.cost_profile import CostProfile
from cbatch.engine import build
from cbatch.engine.memory import cache_sizes
from tests.test_llm import PROMPTS, make, write_model

REPEATING = [prompt * 4 for prompt in PROMPTS]
# Without a slight penalty such a small model repeats one token for ever.
FREE = {"max_tokens": 48, "ignore_eos": True}
GREEDY = SamplingParams(temperature=0, frequency_penalty=0.05, **FREE)
COUPLED = SamplingParams(temperature=0.1, top_k=4, seed=5, **FREE)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return write_model(folder / "target"), write_model(folder / "draft", layers=1)


@pytest.fixture(scope="module")
def plain(pair: tuple[Path, Path]) -> list[list[tuple[int, ...]]]:
    llm = make(pair, draft=False, lookahead="off")
    return [tokens(llm, params) for params in (GREEDY, COUPLED)]


def tokens(llm: LLM, params: Any) -> list[tuple[int, ...]]:
    done = llm.generate(REPEATING, params)
    assert all(c.error is None for c in done), done
    return [c.token_ids for c in done]


@pytest.mark.parametrize(
    ("drafter", "draft", "options"),
    [
        (("ngram",), False, {"lookahead": "ema"}),
        (("suffix", "ngram"), False, {"num_blocks": 14, "lookahead": "fixed:4"}),
        (("suffix", "model"), True, {"max_num_seqs": 3, "lookahead": "ema"}),
        (("model", "ngram"), True, {"overlap": 1, "lookahead": "ema"}),
    ],
)
def test_tokens_do_not_depend_on_the_drafter(pair, plain, drafter, draft, options):
    llm = make(pair, draft=draft, drafter=drafter, **options)
    assert [tokens(llm, params) for params in (GREEDY, COUPLED)] == plain
    speculation = llm.engine.stats.speculation
    assert speculation.accepted_tokens > 40 and speculation.rejections > 10
    assert llm.info.drafter == drafter
    assert "lookahead " + llm.info.lookahead + " by " + ", ".join(drafter) in llm.info.lines()[0]


def test_suffix_drafts_by_default(pair, plain, monkeypatch):
    llm = make(pair, draft=False)
    assert (llm.info.drafter, llm.info.lookahead) == (("suffix",), "adaptive:8")
    assert "lookahead adaptive:8 by suffix" in llm.info.lines()[0]
    assert llm.engine.core.drafters == ("ngram", "suffix")
    assert tokens(llm, GREEDY) == plain[0]
    always = make(pair, draft=False, lookahead="fixed:4")  # whatever a draft costs here
    assert always.info.drafter == ("suffix",)
    assert tokens(always, GREEDY) == plain[0]
    assert always.engine.stats.speculation.accepted_tokens > 40
    assert make(pair).info.drafter == ("model",)

    def sizes(models, options, largest):
        if largest.max_drafts:
            raise FieldError("num_blocks", "no memory for drafts", "")
        return cache_sizes(models, options, largest)

    monkeypatch.setattr(build, "cache_sizes", sizes)
    small = make(pair, draft=False).info
    assert (small.drafter, small.lookahead) == ((), "off"), "a default refuses nothing"
    with pytest.raises(FieldError, match="no memory for drafts"):
        make(pair, draft=False, drafter=("suffix",))


def test_adaptive_without_a_draft_model(pair, plain, tmp_path, monkeypatch):
    """The price of the lookup is measured, too. A lookup has no sequential passes, so a longer
    draft costs hardly more."""
    monkeypatch.setenv("CBATCH_COSTS", str(tmp_path))
    monkeypatch.setenv("CBATCH_PROFILE_SECONDS", "1")  # time for all shapes
    llm = make(pair, draft=False, drafter=("ngram",), lookahead="adaptive:4")
    # Drafts pay only on some machines: where steps are short, no draft pays.
    assert tokens(llm, GREEDY) == plain[0]
    model = make(pair, lookahead="adaptive:4")
    profiles: list[CostProfile] = []
    for loaded in (llm, model):
        profile = loaded.engine.scheduler.config.cost_profile
        assert profile is not None
        profiles.append(profile)
    # Cost of drafting one token, and eight, in a step of one row.
    (one, eight), (model_one, model_eight) = (
        [k * (p.draft_pass_s + p.draft_token_s) for k in (1, 8)] for p in profiles
    )
    assert 0 < one <= eight and 0 < model_one < model_eight
    assert eight - one < model_eight - model_one


@pytest.mark.parametrize(("share", "is_measured"), [(0.8, True), (1.0, False)])
def test_chunks_need_prices_without_drafts(pair, tmp_path, monkeypatch, share, is_measured):
    monkeypatch.setenv("CBATCH_COSTS", str(tmp_path))
    llm = make(pair, draft=False, lookahead="off", prompt_share=share)
    assert (llm.engine.scheduler.config.cost_profile is not None) == is_measured


def test_each_request_may_choose_its_drafter(pair, plain):
    llm = make(pair, drafter=("suffix", "model"), lookahead="fixed:3")
    assert llm.engine.core.drafters == ("model", "ngram", "suffix")
    chains = [("ngram",), ("model", "suffix"), ("suffix",), None]
    params = [msgspec.structs.replace(GREEDY, drafter=chain) for chain in chains]
    assert tokens(llm, params) == plain[0]
    out = SamplingParams(max_tokens=9, temperature=0, drafter=("ngram",), max_lookahead=0)
    (done,) = llm.generate(REPEATING[0], out)
    assert done.speculation.drafted_tokens == 0


def test_without_drafters_a_request_with_a_drafter_is_rejected(pair):
    llm = make(pair, draft=False, lookahead="off")
    assert llm.engine.core.drafters == llm.info.drafter == ()
    assert llm.info.lookahead == "off"
    (done,) = llm.generate("abc", SamplingParams(drafter=("ngram",)))
    assert "start the engine with one" in (done.error or "")
    (done,) = make(pair, draft=False, drafter=("suffix",)).generate(
        "abc", SamplingParams(drafter=("model",))
    )
    assert "'model' is not loaded" in (done.error or "") and "ngram, suffix" in done.error


def test_names_are_checked_before_anything_loads(pair):
    for drafter in ("eagle", ("eagle",), (), ("ngram", "ngram")):
        with pytest.raises(FieldError, match=r"^drafter: .* name one or more of model, ngram"):
            EngineOptions(drafter=drafter)
    with pytest.raises(FieldError, match="^drafter: 'model' needs a draft; give a draft, or use"):
        make(pair, draft=False, drafter=("suffix", "model"))
