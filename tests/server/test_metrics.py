"""Metrics of a server, and of several replicas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cbatch.engine.core import EngineCore
from cbatch.process.client import EngineClient
from cbatch.process.messages import Stepped
from cbatch.server.serving.metrics import merge
from cbatch.server.serving.service import EngineService
from cbatch.text.outputs import Speculation
from tests.process.factories import SimFactory
from tests.process.threads import EngineThread
from tests.server.engines import PROMPT
from tests.server.http_client import Client, sample, samples, serving_service
from tests.toy_engine import TOKENIZER

BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 300, "seed": 1, "ignore_eos": True}


class World(NamedTuple):
    client: Client
    engine: EngineCore
    steps: list[Stepped]


@contextmanager
def served(lookahead: str, step_s: float = 0.012) -> Iterator[World]:
    # A step really takes longer than the simulator reports, so that its parts fit into it.
    engine = SimFactory(lookahead=lookahead, vocab_size=TOKENIZER.vocab_size, step_s=step_s)()
    engine.grammars = None
    link = EngineClient(partial(EngineThread, engine))
    steps: list[Stepped] = []
    link.on_step = steps.append
    with serving_service(EngineService(link, TOKENIZER), TOKENIZER) as client:
        yield World(client, engine, steps)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Serve with `adaptive`, after two calls that drafted."""
    with served("adaptive:4") as world:
        for seed in (1, 2):
            assert world.client.post(BODY | {"seed": seed, "n": 3})[0] == 200
        yield world


def test_the_parts_of_a_step_add_up(world: World) -> None:
    names = ("plan", "draft", "target", "commit")
    parts_s = [sample(world.client, f"cbatch:step_{name}_seconds_total") for name in names]
    total_s = sample(world.client, "cbatch:step_seconds_total")
    assert all(part_s > 0 for part_s in parts_s)
    loop, stats = world.engine.loop, world.engine.scheduler.stats
    assert parts_s == pytest.approx([loop.plan_s, stats.draft_s, stats.target_s, loop.commit_s])
    outputs = [step.output for step in world.steps]
    assert total_s == pytest.approx(sum(each.times.total_s for each in outputs if each.times))
    assert sum(parts_s) < total_s  # the rest is between them


def test_the_parts_of_a_request_add_up(world: World) -> None:
    """Queue and prefill time add up to the time to first token, prefill and decode time to the
    inference time. The engine reports an admission together with the tokens of the first step."""

    def total_s(name: str) -> float:
        assert sample(world.client, f"vllm:{name}_seconds_count") == 6
        return sample(world.client, f"vllm:{name}_seconds_sum")

    prefill_s, first_s = total_s("request_prefill_time"), total_s("time_to_first_token")
    assert total_s("request_queue_time") + prefill_s == pytest.approx(first_s)
    decode_s, inference_s = total_s("request_decode_time"), total_s("request_inference_time")
    assert prefill_s + decode_s == pytest.approx(inference_s) and decode_s > 0 < prefill_s
    outputs = [step.output for step in world.steps]
    admitting_s = [s.times.target_s for s in outputs if s.times for _ in s.admitted]
    assert len(admitting_s) == 6 and prefill_s > 0.9 * sum(admitting_s) > 0
    for name, total in (("request_params_n", 6), ("request_params_max_tokens", 600)):
        assert sample(world.client, f"vllm:{name}_sum") == total
        assert sample(world.client, f"vllm:{name}_count") == 2
    hits = world.engine.scheduler.stats.prefix_hit_tokens
    assert sample(world.client, "vllm:prompt_tokens_cached_total") == hits > 0


def test_metrics_of_the_adaptive_policy(world: World) -> None:
    stats = world.engine.scheduler.state.policy.stats
    assert stats is not None
    assert sample(world.client, "cbatch:lookahead_on") == stats.drafting
    shown = {each.name: each.value for each in samples(world.client)}
    for name, value in (
        ("lambda", stats.threshold),
        ("expected_tokens_per_second", stats.tokens_per_s),
        ("expected_gain", stats.gain),
    ):
        assert shown.get(f"cbatch:lookahead_{name}") == value
        assert value is None or value > 0
    drafted, predicted, observed = (
        [sample(world.client, f"cbatch:survival_{name}_total", position=str(i)) for i in range(4)]
        for name in ("drafts", "predicted", "observed")
    )
    assert drafted[0] > 10 and sorted(drafted, reverse=True) == drafted
    assert all(each <= of for each, of in zip(observed, drafted, strict=True))
    assert all(0 <= each <= of for each, of in zip(predicted, drafted, strict=True))
    assert predicted[0] / drafted[0] == pytest.approx(0.7, abs=0.15)  # the simulator's acceptance


def recounted(steps: list[Stepped]) -> Speculation:
    """Recount lookahead from the engine's outputs, step by step. A request's first tokens end its
    prompt."""
    speculation, begun = Speculation(), set()
    for row in (row for step in steps for row in step.output.rows):
        if row.request_id in begun:
            speculation.observe(row.num_drafted, row.num_accepted)
        begun.add(row.request_id)
    return speculation


def test_the_page_is_valid_for_prometheus() -> None:
    with served("fixed:3", step_s=0.0) as (client, engine, steps):
        usage = client.post(BODY | {"seed": 5, "n": 2, "max_tokens": 40})[1]["usage"]
        client.post({"prompt": [PROMPT, "class"], "max_tokens": 1, "seed": 1})
        assert client.post({"prompt": 3})[0] == 400
        prompts = 2 * len(TOKENIZER.encode(PROMPT)) + len(TOKENIZER.encode("class"))
        assert usage["completion_tokens"] == 80
        counts, stats = recounted(steps), engine.scheduler.stats
        assert counts.accepted_tokens > 5 and stats.target_s > 0
        total_s = sum(step.output.times.total_s for step in steps if step.output.times)
        wasted = counts.drafted_tokens - counts.accepted_tokens
        drafts = "vllm:spec_decode_num"
        for name, labels, value in (
            ("vllm:prompt_tokens_total", {}, prompts),
            ("vllm:generation_tokens_total", {}, 82),
            ("vllm:request_success_total", {"finished_reason": "length"}, 4),
            ("vllm:request_success_total", {"finished_reason": "abort"}, 0),
            ("vllm:admission_rejections_total", {"reason": "invalid"}, 1),
            (f"{drafts}_drafts_total", {}, counts.steps - counts.k_histogram.get(0, 0)),
            (f"{drafts}_draft_tokens_total", {}, counts.drafted_tokens),
            (f"{drafts}_accepted_tokens_total", {}, counts.accepted_tokens),
            ("cbatch:wasted_verify_tokens_total", {}, wasted),
            ("cbatch:lookahead_tokens_count", {}, counts.steps),
            ("cbatch:lookahead_tokens_bucket", {"le": "0.0"}, counts.k_histogram.get(0, 0)),
            ("cbatch:lookahead_tokens_bucket", {"le": "3.0"}, counts.steps),
            ("vllm:time_to_first_token_seconds_count", {}, 4),
            ("vllm:e2e_request_latency_seconds_count", {}, 4),
            ("vllm:request_time_per_output_token_seconds_count", {}, 2),
            ("vllm:request_generation_tokens_sum", {}, 82),
            ("vllm:prefix_cache_queries_total", {}, stats.prompt_tokens),
            ("cbatch:steps_total", {}, stats.steps),
            ("cbatch:step_target_seconds_total", {}, stats.target_s),
            ("cbatch:step_seconds_total", {}, total_s),
        ):
            assert sample(client, name, **labels) == pytest.approx(value), name
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "cbatch:open_calls"):
            assert sample(client, name) == 0
        for name in ("queued_requests", "queued_prompt_tokens", "engine_restarts_total"):
            assert sample(client, f"cbatch:{name}") == 0
        assert sample(client, "vllm:kv_cache_usage_perc") == 0
        at = [
            sample(client, f"{drafts}_accepted_tokens_per_pos_total", position=str(i))
            for i in range(3)
        ]
        assert sum(at) == counts.accepted_tokens and at == sorted(at, reverse=True)
        names = {each.name for each in samples(client)}
        assert "cbatch:lookahead_on" not in names, "only the adaptive policy has a price"
        assert "cbatch:state_pages" not in names, "only recurrent layers have states"


def test_every_series_has_its_replicas_label(demo_client: Client) -> None:
    def series(page: str) -> Iterator[tuple[str | None, tuple[object, ...], float]]:
        for family in text_string_to_metric_families(page):
            for name, labels, value, *_ in family.samples:
                replica = labels.pop("replica", None)
                yield replica, (name, *sorted(labels.items())), value

    demo_client.post({"prompt": "def", "max_tokens": 3})
    with demo_client.open(None, "/metrics") as answer:
        page = answer.read()
    merged = merge([("a", page), ("b", page)]).decode()
    alone = {key: value for _, key, value in series(page.decode())}
    assert any(name == "vllm:e2e_request_latency_seconds_bucket" for name, *_ in alone)
    values: dict[str | None, dict[tuple[object, ...], float]] = {"a": {}, "b": {}}
    for replica, key, value in series(merged):
        values[replica][key] = value
    assert values == {"a": alone, "b": alone}
    heads = [line for line in merged.splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads)) > 20, "a family has one header"
