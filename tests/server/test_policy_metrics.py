"""What Prometheus reads of the policy, of a step's parts and of a request's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest

from cbatch.engine.client import EngineClient
from cbatch.engine.process import EngineParts
from cbatch.engine.wire import Stepped
from cbatch.server.service import EngineService
from tests.engine.factories import SimFactory
from tests.engine.threads import EngineThread
from tests.server.http_client import Client, sample, serving_service
from tests.server.test_app import PROMPT
from tests.toy_engine import TOKENIZER

BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 300, "seed": 1, "ignore_eos": True}


class World(NamedTuple):
    client: Client
    engine: EngineParts
    steps: list[Stepped]


@contextmanager
def served(lookahead: str) -> Iterator[World]:
    # A real step takes longer than the simulator says it does: its parts fit into it.
    engine = SimFactory(lookahead=lookahead, vocab_size=TOKENIZER.vocab_size, step_s=0.012)()
    link = EngineClient(partial(EngineThread, engine.scheduler, engine.loop))
    steps: list[Stepped] = []
    link.on_step = steps.append
    with serving_service(EngineService(link, TOKENIZER), TOKENIZER) as client:
        yield World(client, engine, steps)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """`goodput`, after two calls that drafted."""
    with served("goodput:4") as world:
        for seed in (1, 2):
            assert world.client.post(BODY | {"seed": seed, "n": 3})[0] == 200
        yield world


def test_a_steps_parts_make_the_step(world: World) -> None:
    names = ("plan", "draft", "target", "commit")
    parts_s = [sample(world.client, f"cbatch:step_{name}_seconds_total") for name in names]
    total_s = sample(world.client, "cbatch:step_seconds_total")
    assert all(part_s > 0 for part_s in parts_s)
    loop, stats = world.engine.loop, world.engine.scheduler.stats
    assert parts_s == pytest.approx([loop.plan_s, stats.draft_s, stats.target_s, loop.commit_s])
    assert total_s == pytest.approx(sum(s.times.total_s for s in world.steps if s.times))
    assert sum(parts_s) < total_s  # the rest is between them


def test_a_requests_parts_make_the_request(world: World) -> None:
    """Queue and prefill are the time to the first token, prefill and decode are inference."""

    def total_s(name: str) -> float:
        assert sample(world.client, f"vllm:{name}_seconds_count") == 6
        return sample(world.client, f"vllm:{name}_seconds_sum")

    prefill_s, first_s = total_s("request_prefill_time"), total_s("time_to_first_token")
    assert total_s("request_queue_time") + prefill_s == pytest.approx(first_s)
    decode_s, inference_s = total_s("request_decode_time"), total_s("request_inference_time")
    assert prefill_s + decode_s == pytest.approx(inference_s) and decode_s > 0 < prefill_s


def test_a_step_is_no_time_in_the_queue(world: World) -> None:
    """An engine tells that it admitted a request with the tokens of its first step."""
    admitting_s = [s.times.target_s for s in world.steps if s.times for _ in s.admitted]
    prefill_s = sample(world.client, "vllm:request_prefill_time_seconds_sum")
    assert len(admitting_s) == 6 and prefill_s > 0.9 * sum(admitting_s) > 0


def test_what_was_asked_for(world: World) -> None:
    for name, total in (("request_params_n", 6), ("request_params_max_tokens", 600)):
        assert sample(world.client, f"vllm:{name}_sum") == total
        assert sample(world.client, f"vllm:{name}_count") == 2
    hits = world.engine.scheduler.stats.prefix_hit_tokens
    assert sample(world.client, "vllm:prompt_tokens_cached_total") == hits > 0


def test_what_the_policy_goes_by(world: World) -> None:
    controller = world.engine.scheduler.state.controller
    assert controller is not None
    outlook = controller.outlook
    assert sample(world.client, "cbatch:lookahead_on") == outlook.drafting
    for name, value in (
        ("lambda", outlook.price),
        ("expected_tokens_per_second", outlook.tokens_per_s),
        ("expected_gain", outlook.gain),
    ):
        if value is None:
            with pytest.raises(AssertionError, match="is not there"):
                sample(world.client, f"cbatch:lookahead_{name}")
        else:
            assert sample(world.client, f"cbatch:lookahead_{name}") == value > 0
    drafted, predicted, observed = (
        [sample(world.client, f"cbatch:survival_{name}_total", position=str(i)) for i in range(4)]
        for name in ("drafts", "predicted", "observed")
    )
    assert drafted[0] > 10 and sorted(drafted, reverse=True) == drafted
    assert all(each <= of for each, of in zip(observed, drafted, strict=True))
    assert all(0 <= each <= of for each, of in zip(predicted, drafted, strict=True))
    assert predicted[0] / drafted[0] == pytest.approx(0.7, abs=0.15)  # the simulator's acceptance


def test_only_that_policy_has_a_price() -> None:
    with served("ema:4") as world:
        world.client.post(BODY | {"max_tokens": 20})
        assert sample(world.client, "cbatch:steps_total") > 0
        with pytest.raises(AssertionError, match="is not there"):
            sample(world.client, "cbatch:lookahead_on")
