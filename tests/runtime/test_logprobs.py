"""Log probabilities: the model's own numbers, with the same bits however the engine computes a
token."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from cbatch.core.request.request import SamplingParams
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.engine.core import EngineCore
from cbatch.engine.engine import Engine
from cbatch.engine.loop import ThreadedExecutor
from cbatch.llm import complete_all
from cbatch.runtime.cpu.drafters.draft_model import DraftModel
from cbatch.runtime.sampling.logprobs import describe
from cbatch.text.outputs import Completion, TokenLogprob
from tests.runtime.engines import VOCAB, RecordingExecutor, parse_lookahead, tiny_model
from tests.runtime.reference import next_logits, slow_filter
from tests.runtime.test_executor import admit
from tests.runtime.test_logits_processors import slow_shape

NOISE = 0.06
TOP = 4
SHAPES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "repetition_penalty": 1.3},
    {"temperature": 0.0, "frequency_penalty": 0.6, "banned_token_ids": (3, 9)},
    {"temperature": 1.2, "min_p": 0.05, "logit_bias": {5: 2.0}, "min_tokens": 6},
    {"temperature": 0.9, "allowed_token_ids": tuple(range(0, VOCAB, 3)), "top_k": 3},
)


@functools.cache
def prompts() -> tuple[tuple[int, ...], ...]:
    rng = np.random.default_rng(8)
    return tuple(tuple(rng.integers(0, VOCAB, 5 + 9 * i).tolist()) for i in range(len(SHAPES)))


class World:
    def __init__(self, *, lookahead: str = "off", depth: int = 0, **settings: Any) -> None:
        sizes = {"num_blocks": 256, "block_size": 4, "max_num_seqs": 8} | {
            name: settings.pop(name) for name in ("num_blocks", "max_num_seqs") if name in settings
        }
        draft = None if lookahead == "off" else tiny_model(noise=NOISE)
        config = SchedulerConfig(
            max_model_len=256,
            vocab_size=VOCAB,
            draft_context_tokens=None if draft is None else 256,
            lookahead=parse_lookahead(lookahead),
            **({"max_num_batched_tokens": 256, "decode_reserve_tokens": 4} | sizes | settings),
        )
        drafter = None if draft is None else DraftModel(draft)
        self.scheduler = Scheduler(config)
        self.executor = RecordingExecutor(tiny_model(), drafter=drafter, **sizes)
        runner = ThreadedExecutor(self.executor) if depth else self.executor
        self.engine = Engine(EngineCore(self.scheduler, runner, depth=depth), seed=1)

    def complete(self, **extra: Any) -> list[Completion]:
        params = [
            SamplingParams(
                **({"max_tokens": 16, "ignore_eos": True, "seed": i, "logprobs": TOP} | s | extra)
            )
            for i, s in enumerate(SHAPES)
        ]
        return complete_all(self.engine, prompts(), params)

    def assert_speculated(self) -> None:
        drafted, accepted = (
            np.concatenate(x) for x in (self.executor.drafted, self.executor.accepted)
        )
        assert (accepted >= 2).any() and (accepted < drafted).any() and (drafted == 0).any()


@functools.cache
def plain(**extra: Any) -> list[Completion]:
    return World(max_num_seqs=1, enable_prefix_caching=False).complete(**extra)


def numbers(completions: list[Completion]) -> list[Any]:
    return [(c.token_ids, c.logprobs, c.prompt_logprobs) for c in completions]


def check_top(entry: TokenLogprob, logprobs: np.ndarray) -> None:
    """Compare with float64, in the order (-logprob, id)."""
    assert entry.logprob == pytest.approx(logprobs[entry.token_id], abs=1e-5)
    values = [-math.inf if value is None else value for _, value in entry.top]
    best = sorted(range(VOCAB), key=lambda i: (-logprobs[i], i))[: len(values)]
    assert values == pytest.approx([logprobs[i] for i in best], abs=1e-5)
    assert [i for i, _ in entry.top] == best


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.asarray(logits - np.logaddexp.reduce(logits))


def check_raw(completions: list[Completion]) -> None:
    model = tiny_model()
    for completion in completions:
        prompt, output = list(completion.prompt_token_ids), list(completion.token_ids)
        assert completion.logprobs is not None
        assert [entry.token_id for entry in completion.logprobs] == output
        raw = next_logits(model, [prompt + output[:n] for n in range(len(output))])
        for logits, entry in zip(raw, completion.logprobs, strict=True):
            assert len(entry.top) == TOP
            check_top(entry, softmax(logits))


def test_raw_is_the_log_softmax_of_the_models_own_logits():
    check_raw(plain())


def test_processed_is_the_distribution_that_was_sampled_from():
    forbidden = 0
    completions = plain(logprobs_mode="processed")
    for shape, completion in zip(SHAPES, completions, strict=True):
        params = SamplingParams(**shape)
        prompt, output = list(completion.prompt_token_ids), list(completion.token_ids)
        raw = next_logits(tiny_model(), [prompt + output[:n] for n in range(len(output))])
        for n, (logits, entry) in enumerate(zip(raw, completion.logprobs or (), strict=True)):
            shaped = slow_shape(logits, params, (), prompt, output[:n])
            filters = params.temperature or 1.0, params.top_k or VOCAB, params.top_p, params.min_p
            with np.errstate(divide="ignore"):
                check_top(entry, np.log(slow_filter(shaped.tolist(), *filters)))
            assert entry.logprob is not None
            forbidden += sum(value is None for _, value in entry.top)
    assert forbidden > 15


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_speculation_changes_no_bit(mode):
    base = numbers(plain(logprobs_mode=mode))
    for lookahead in ("fixed:5", "ema:6"):
        world = World(lookahead=lookahead)
        assert numbers(world.complete(logprobs_mode=mode)) == base
    world.assert_speculated()
    world = World(lookahead="fixed:3", depth=1, num_blocks=44, max_num_batched_tokens=40)
    assert numbers(world.complete(logprobs_mode=mode)) == base
    world.assert_speculated()
    assert world.scheduler.stats.preemptions > 0


def test_a_request_for_fewer_gets_fewer():
    none = World(lookahead="fixed:3").complete(logprobs=None)
    assert all(c.logprobs is None and c.prompt_logprobs is None for c in none)
    chosen = World(lookahead="fixed:3").complete(logprobs=0)
    for few, many in zip(chosen, plain(), strict=True):
        assert [e.logprob for e in few.logprobs] == [e.logprob for e in many.logprobs]
        assert all(entry.top == () for entry in few.logprobs)
    assert [c.token_ids for c in none] == [c.token_ids for c in plain()]


def test_outputs_carry_their_own():
    """They come step by step, and end where a stop id cuts an accepted run."""
    stop = plain()[0].token_ids[10]
    world = World(lookahead="fixed:5")
    params = SamplingParams(max_tokens=16, temperature=0, stop_token_ids=(stop,), logprobs=1)
    world.engine.add(prompts()[0], params, request_id="r")
    parts: list[TokenLogprob] = []
    while world.engine.has_work:
        for output in world.engine.step():
            assert len(output.logprobs or ()) == len(output.token_ids)
            parts += output.logprobs or ()
            ended = output.finished
    assert ended is not None and tuple(parts) == ended.logprobs
    assert ended.token_ids == plain()[0].token_ids[: len(parts)] and ended.token_ids[-1] == stop


def test_ties_go_to_the_lowest_id():
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    entry = describe(0, 7, logits, np.array([2, 4]), 3)
    assert entry.top_ids.tolist() == [[1, 3, 0], [0, 1, 2]] and entry.first_position == 7
    assert entry.chosen.tolist() == pytest.approx(
        [float(logits[0].log_softmax(0)[2]), -math.log(5)]
    )
    assert describe(0, 7, logits, np.array([2, 4]), 20).top.shape == (2, 5)


def test_a_row_has_the_same_bits_in_any_company():
    rows = torch.randn(7, 5001, generator=torch.Generator().manual_seed(1)) * 4
    tokens = np.arange(7)
    together = describe(0, 0, rows, tokens, 5)
    for i in range(7):
        alone = describe(0, 0, rows[i : i + 1], tokens[i : i + 1], 5)
        assert alone.chosen.tobytes() == together.chosen[i : i + 1].tobytes()
        assert alone.top.tobytes() == together.top[i : i + 1].tobytes()


# --- prompts --------------------------------------------------------------------------------------


@functools.cache
def plain_prompts() -> list[Completion]:
    return World(max_num_seqs=1, enable_prefix_caching=False).complete(prompt_logprobs=2)


def test_every_token_of_a_prompt():
    for prompt, completion in zip(prompts(), plain_prompts(), strict=True):
        entries = completion.prompt_logprobs
        assert entries is not None and len(entries) == len(prompt) and entries[0] is None
        raw = next_logits(tiny_model(), [prompt[:n] for n in range(1, len(prompt))])
        for token, logits, entry in zip(prompt[1:], raw, entries[1:], strict=True):
            assert entry is not None and entry.token_id == token and len(entry.top) == 2
            check_top(entry, softmax(logits))


@pytest.mark.parametrize("depth", [0, 1])
def test_prompts_in_chunks_during_decodes_and_after_preemptions(depth):
    world = World(lookahead="fixed:3", depth=depth, num_blocks=36, max_num_batched_tokens=14)
    assert numbers(world.complete(prompt_logprobs=2)) == numbers(plain_prompts())
    assert any(chunks and deciding for chunks, deciding in world.executor.chunk_steps)
    assert world.scheduler.stats.preemptions > 0


def test_an_admission_that_would_lose_some_is_refused():
    admission = admit(0, [1, 2, 3, 4, 5], prompt_logprobs=0)
    structs.force_setattr(admission, "kv_len_tokens", 4)
    with pytest.raises(ValueError, match="prompt are requested"):
        World().executor.table.admit(admission)
