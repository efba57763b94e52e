"""What Prometheus reads, against what the engine told and the clients got."""

from __future__ import annotations

from functools import partial

import pytest

from cbatch.engine.client import EngineClient
from cbatch.engine.wire import Stepped
from cbatch.outputs import Speculation
from cbatch.server.service import EngineService
from tests.engine.threads import EngineThread
from tests.server.http_client import sample, serving_service
from tests.toy_engine import TOKENIZER, make_engine

PROMPT = "def add(a, b):"
BODY = {"prompt": PROMPT, "max_tokens": 20, "seed": 5}


def recounted(steps: list[Stepped]) -> Speculation:
    """Lookahead as the engine told it, step by step. A request's first tokens end its prompt."""
    found, begun = Speculation(), set()
    for row in (row for step in steps for row in step.rows):
        if row.request_id in begun:
            found.observe(row.num_drafted, row.num_accepted)
        begun.add(row.request_id)
    return found


def test_what_prometheus_reads() -> None:
    engine = make_engine(lookahead="fixed:3")
    link = EngineClient(partial(EngineThread, engine.scheduler, engine.loop))
    steps: list[Stepped] = []
    link.on_step = steps.append
    with serving_service(EngineService(link, TOKENIZER), TOKENIZER) as client:
        usage = client.post(BODY | {"n": 2, "max_tokens": 40})[1]["usage"]
        client.post({"prompt": [PROMPT, "class"], "max_tokens": 1, "seed": 1})
        assert client.post({"prompt": 3})[0] == 400
        prompts = 2 * len(TOKENIZER.encode(PROMPT)) + len(TOKENIZER.encode("class"))
        assert usage["completion_tokens"] == 80
        counts, stats = recounted(steps), engine.scheduler.stats
        assert counts.accepted_tokens > 5 and stats.target_s > 0
        total_s = sum(step.times.total_s for step in steps if step.times is not None)
        wasted = counts.drafted_tokens - counts.accepted_tokens
        drafting = counts.steps - counts.k_histogram.get(0, 0)
        for name, labels, value in (
            ("vllm:prompt_tokens_total", {}, prompts),
            ("vllm:generation_tokens_total", {}, 82),
            ("vllm:request_success_total", {"finished_reason": "length"}, 4),
            ("vllm:request_success_total", {"finished_reason": "abort"}, 0),
            ("vllm:admission_rejections_total", {"reason": "invalid"}, 1),
            ("vllm:spec_decode_num_drafts_total", {}, drafting),
            ("vllm:spec_decode_num_draft_tokens_total", {}, counts.drafted_tokens),
            ("vllm:spec_decode_num_accepted_tokens_total", {}, counts.accepted_tokens),
            ("cbatch:wasted_verify_tokens_total", {}, wasted),
            ("cbatch:lookahead_tokens_count", {}, counts.steps),
            ("cbatch:lookahead_tokens_bucket", {"le": "0.0"}, counts.k_histogram.get(0, 0)),
            ("cbatch:lookahead_tokens_bucket", {"le": "3.0"}, counts.steps),
            ("vllm:time_to_first_token_seconds_count", {}, 4),
            ("vllm:e2e_request_latency_seconds_count", {}, 4),
            ("vllm:request_time_per_output_token_seconds_count", {}, 2),
            ("vllm:request_generation_tokens_sum", {}, 82),
            ("vllm:num_requests_running", {}, 0),
            ("vllm:num_requests_waiting", {}, 0),
            ("vllm:kv_cache_usage_perc", {}, 0),
            ("vllm:prefix_cache_queries_total", {}, stats.prompt_tokens),
            ("cbatch:steps_total", {}, stats.steps),
            ("cbatch:step_target_seconds_total", {}, stats.target_s),
            ("cbatch:step_seconds_total", {}, total_s),
            ("cbatch:engine_restarts_total", {}, 0),
            ("cbatch:queued_requests", {}, 0),
            ("cbatch:queued_prompt_tokens", {}, 0),
        ):
            assert sample(client, name, **labels) == pytest.approx(value), name
        at = [
            sample(client, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(i))
            for i in range(3)
        ]
        assert sum(at) == counts.accepted_tokens and at == sorted(at, reverse=True)
