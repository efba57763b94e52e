"""Tensor parallelism with real processes: the text is the same for any batch, k and chunk, and
after a restart. All ranks end together."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cbatch import LLM, FieldError, SamplingParams, StructuredOutputs
from cbatch.demo import demo_head, demo_paths, demo_prompts
from cbatch.engine.ranks.group import RankedExecutor, Ranks, RanksLostError
from cbatch.runtime.cpu import executor as executor_module
from tests.runtime.marks import needs_compiler
from tests.test_llm import write_model

TARGET, DRAFT = demo_paths()
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(5, 90, 3 + 5 * (i % 6)).tolist() for i in range(32)]
# Greedy, seeded (drafts are then verified by coupling), and one with a grammar.
PARAMS = [
    SamplingParams(max_tokens=30 + i % 9, temperature=0, ignore_eos=True)
    if i % 3
    else SamplingParams(max_tokens=32, temperature=0.8, top_p=0.9, seed=i, ignore_eos=True)
    for i in range(31)
] + [
    SamplingParams(
        max_tokens=20, temperature=0, structured_outputs=StructuredOutputs(regex="[0-9]{4}")
    )
]


def make(model: Path = TARGET, draft: Path | None = DRAFT, **options: Any) -> LLM:
    settings = {"tensor_parallel_size": 2, "threads": 1, "dtype": "float32", "num_blocks": 256}
    return LLM(model, draft, **(settings | options))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of few layers. Few layers make few messages, which are slow on a busy
    machine."""
    folder = tmp_path_factory.mktemp("models")
    for name, layers in (("tiny", 2), ("draft", 1)):
        file = write_model(folder / name, hidden=64, layers=layers) / "config.json"
        config = json.loads(file.read_text())
        config |= {"num_attention_heads": 8, "num_key_value_heads": 4}
        file.write_text(json.dumps(config))
    return folder


def ranks_of(llm: LLM) -> Ranks:
    executor = llm.engine.core.executor
    assert isinstance(executor, RankedExecutor)
    return executor.ranks


def gone(pid: int, limit_s: float = 60) -> bool:
    until_s = time.monotonic() + limit_s
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until_s:
        time.sleep(0.01)
    return not Path(f"/proc/{pid}").exists()


@pytest.fixture(autouse=True)
def threads_as_before() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def drawn(tiny: Path) -> dict[str, Any]:
    return {"model": tiny / "tiny", "draft": tiny / "draft", "random_weights_seed": 3}


@pytest.fixture(scope="module")
def plain(drawn: dict[str, Any]) -> LLM:
    return make(**drawn, lookahead="off", max_num_seqs=32)


@pytest.fixture(scope="module")
def busy(drawn: dict[str, Any]) -> LLM:
    scarce = {"max_num_seqs": 8, "max_num_batched_tokens": 41, "num_blocks": 14, "overlap": 1}
    return make(**drawn, lookahead="fixed:4", drafter=("suffix", "model"), **scarce)


def test_text_does_not_depend_on_how_the_engine_runs(
    plain: LLM, busy: LLM, drawn: dict[str, Any]
) -> None:
    """Requests run alone and in batches of 32, with k = 0 and 4, with whole prompts and chunks,
    with and without preemption, and on other ranks."""
    assert plain.info.batch_invariant and plain.info.ranks == 2 and plain.info.num_threads == 1
    tokens = [c.token_ids for c in plain.generate(PROMPTS, PARAMS)]
    alone = [plain.generate(PROMPTS[i], PARAMS[i])[0].token_ids for i in (0, 5, 31)]
    assert alone == [tokens[i] for i in (0, 5, 31)]
    assert plain.engine.scheduler.stats.preemptions == 0
    assert len(set(tokens)) > 20 and all(c for c in tokens)
    logged = SamplingParams(max_tokens=30, temperature=0, logprobs=1, ignore_eos=True)
    whole = make(**drawn, lookahead="off", tensor_parallel_size=1)
    both = (llm.generate(PROMPTS[7], logged)[0].choices[0].logprobs for llm in (plain, whole))
    for mine, expected in zip(*both, strict=True):
        assert mine.token_id == expected.token_id
        assert abs(mine.logprob - expected.logprob) < 1e-4
    assert [c.token_ids for c in busy.generate(PROMPTS, PARAMS)] == tokens
    stats, speculation = busy.engine.scheduler.stats, busy.engine.stats.speculation
    assert stats.preemptions > 3, "the pool must have run short"
    assert speculation.accepted_tokens > 10 and speculation.rejections > 10


def test_a_killed_rank_ends_the_others_and_is_named(plain: LLM) -> None:
    """Ctrl-C, which a terminal sends to all processes, ends none of them: rank 0 decides."""
    ranks = ranks_of(plain)
    before = plain.generate([[1, 2]], PARAMS[1])
    os.kill(ranks.pids[0], signal.SIGINT)
    assert plain.generate([[1, 2]], PARAMS[1])[0].token_ids == before[0].token_ids
    os.kill(ranks.pids[0], signal.SIGKILL)
    with pytest.raises(RanksLostError, match="rank 1 was killed by SIGKILL; all ranks stop"):
        plain.generate([PROMPTS[8]] * 2, PARAMS[1])
    assert all(map(gone, ranks.pids))
    with pytest.raises(RanksLostError, match="rank 1 was killed by SIGKILL"):
        plain.generate([1, 2], PARAMS[1])


def test_a_rank_with_another_result_is_detected(busy: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    verify = executor_module.verify

    def other(*args: Any) -> Any:
        verified = verify(*args)
        verified.tokens[0, 0] ^= 1
        return verified

    monkeypatch.setattr(executor_module, "verify", other)
    with pytest.raises(RanksLostError, match=r"rank 1 computed \(\d+, \d+\), rank 0 \(\d+, \d+\)"):
        busy.generate(PROMPTS[0], PARAMS[1])


@needs_compiler
def test_a_head_drafts_and_changes_no_text() -> None:
    """Both ranks run the self-test. Closed ranks end."""
    prompts, tokens = demo_prompts()[:6], []
    scarce = {"max_num_seqs": 6, "num_blocks": 18, "max_num_batched_tokens": 64}
    llm = make(draft=demo_head(), lookahead="fixed:4", **scarce)
    for limit in (0, None):
        params = [
            SamplingParams(
                max_tokens=40,
                temperature=0.8 * (i % 2),
                seed=i,
                ignore_eos=True,
                max_lookahead=limit,
            )
            for i in range(6)
        ]
        tokens.append([c.token_ids for c in llm.generate(prompts, params)])
        assert (llm.engine.stats.speculation.accepted_tokens > 20) == (limit is None)
    assert tokens[0] == tokens[1]
    stats, speculation = llm.engine.scheduler.stats, llm.engine.stats.speculation
    assert stats.preemptions > 0 and speculation.rejections > 0
    (pid,) = ranks_of(llm).pids
    ranks_of(llm).close()
    assert gone(pid)


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: 0 is not allowed; give 1 or more"),
        (
            {"tensor_parallel_size": 3},
            "tensor_parallel_size: 3 does not divide .* num_key_value_heads, 4",
        ),
        (
            {"device": "cuda"},
            "tensor_parallel_size: 2 ranks are supported on CPUs only; use --device cpu",
        ),
    ],
)
def test_models_that_cannot_be_split_are_rejected(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(FieldError, match=problem):
        LLM(TARGET, **({"tensor_parallel_size": 2} | options))
