"""Prometheus metrics: with vLLM's names where vLLM has the metric, else with cbatch's.

`RequestTotals` counts requests, tokens, times and drafts. Data that only the engine has (slots, KV,
prefix cache, steps) comes from the latest statistics, and is left out until the first arrive. The
engine's counters restart at 0 with the engine, which Prometheus' `rate()` allows for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.engine.core import EngineMetrics
from cbatch.server.serving.request_record import RequestTotals
from cbatch.server.serving.service import EngineService

LABELS = ("model_name", "engine")
LABEL = "replica"  # of a series that comes from one of several replicas
# Kind and label of a metric, its name, the place of its value in `Metrics`, and its text. A metric
# is left out while its place, or an object on the way to it, is None.
_TABLE = """
counter | vllm:prompt_tokens | prompt_tokens | Prompt tokens of accepted requests.
counter | vllm:generation_tokens | generation_tokens | Generated tokens.
counter finished_reason | vllm:request_success | endings | Finished sequences, by reason.
counter reason | vllm:admission_rejections | all_rejections | Rejected calls, by reason.
counter | vllm:spec_decode_num_drafts | drafting.steps | Verifications of drafts, one per sequence \
and step.
counter | vllm:spec_decode_num_draft_tokens | drafting.drafted_tokens | Drafted tokens.
counter | vllm:spec_decode_num_accepted_tokens | drafting.accepted_tokens | Accepted drafts.
counter position | vllm:spec_decode_num_accepted_tokens_per_pos | drafting.accepted_at | Accepted \
drafts, by position.
counter | cbatch:wasted_verify_tokens | drafting.wasted_tokens | Rejected drafts.
histogram | vllm:time_to_first_token_seconds | first_token_s | From call to first token.
histogram | vllm:inter_token_latency_seconds | inter_token_s | Between outputs of successive steps.
histogram | vllm:request_time_per_output_token_seconds | per_token_s | Mean time per token after \
the first.
histogram | vllm:request_queue_time_seconds | queue_s | From call to slot.
histogram | vllm:request_prefill_time_seconds | prefill_s | From slot to first token.
histogram | vllm:request_decode_time_seconds | decode_s | From first to last token.
histogram | vllm:request_inference_time_seconds | inference_s | From slot to last token.
histogram | vllm:e2e_request_latency_seconds | e2e_s | From call to last token.
histogram | vllm:request_prompt_tokens | prompt | Prompt tokens per sequence.
histogram | vllm:request_generation_tokens | generation | Output tokens per sequence.
histogram | vllm:request_params_n | choices | Choices per prompt (n).
histogram | vllm:request_params_max_tokens | max_tokens | Requested max_tokens.
histogram | cbatch:lookahead_tokens | lookahead | Drafts per sequence and decoding step (k).
gauge | cbatch:queued_requests | service.queue.num_requests | Accepted sequences that wait for \
their first slot.
gauge | cbatch:queued_prompt_tokens | service.queue.num_prompt_tokens | Prompt tokens of calls \
that wait for their first slot.
gauge | cbatch:estimated_prompt_seconds | service.queue.estimated_prefill_s | Estimated seconds \
until all received prompts are computed.
gauge | cbatch:open_calls | service.num_open | Open calls, including those whose prompt or grammar \
is still processed.
counter | cbatch:engine_restarts | service.client.num_restarts | Restarts of the engine process.
counter | cbatch:kv_event_batches | service.kv_events.num_published | Batches of KV events, sent \
or dropped.
counter | cbatch:kv_event_batches_dropped | service.kv_events.num_dropped | Batches of KV events \
dropped because the queue was full.
gauge | vllm:num_requests_running | stats.num_running | Sequences in a slot.
gauge | vllm:num_requests_waiting | stats.num_waiting | Sequences that wait for a slot.
gauge | vllm:kv_cache_usage_perc | stats.kv_usage | Share of KV blocks in use (0 to 1).
gauge | cbatch:state_pages | stats.state_pages | Pages for the states of recurrent layers.
gauge | cbatch:state_pages_used | stats.used_state_pages | State pages in use, without those \
kept for prefix hits only.
counter | vllm:num_preemptions | stats.totals.preemptions | Preemptions.
counter | vllm:prefix_cache_queries | stats.totals.prompt_tokens | Prompt tokens looked up in the \
prefix cache.
counter | vllm:prefix_cache_hits | stats.totals.prefix_hit_tokens | Prompt tokens found in the \
prefix cache.
counter | vllm:prompt_tokens_cached | stats.totals.prefix_hit_tokens | Prompt tokens found in the \
prefix cache.
counter | cbatch:steps | stats.totals.steps | Steps of the engine.
counter | cbatch:executor_resets | stats.totals.executor_resets | Recoveries from faults of the \
executor.
counter | cbatch:step_draft_seconds | stats.totals.draft_s | Time in drafters.
counter | cbatch:step_target_seconds | stats.totals.target_s | Time in the model.
counter | cbatch:step_plan_seconds | stats.plan_s | Time in planning.
counter | cbatch:step_commit_seconds | stats.commit_s | Time in committing.
counter | cbatch:step_seconds | stats.step_s | Time in steps, planning included.
gauge | cbatch:lookahead_on | stats.policy.drafting | 1 if the lookahead policy drafts, else 0.
gauge | cbatch:lookahead_lambda | stats.policy.threshold | Minimum survival probability at which a \
draft pays at this load.
gauge | cbatch:lookahead_expected_tokens_per_second | stats.policy.tokens_per_s | Expected tokens \
per second of the chosen drafts.
gauge | cbatch:lookahead_expected_gain | stats.policy.gain | Expected gain over no drafts (0: none).
counter position | cbatch:survival_drafts | stats.policy.calibration.drafted | Drafts in observed \
steps.
counter position | cbatch:survival_predicted | stats.policy.calibration.predicted | Drafts in \
observed steps that were expected to survive.
counter position | cbatch:survival_observed | stats.policy.calibration.survived | Drafts in \
observed steps that survived.
"""
_ROWS = [line.split(" | ") for line in _TABLE.strip().splitlines()]
_FAMILIES: dict[str, Any] = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}


class Metrics(RequestTotals, Collector):
    """The metrics of one served model, in addition to the totals of its requests."""

    def __init__(self, model: str, service: EngineService) -> None:
        super().__init__()
        self._labels, self.service = (model, "0"), service
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def page(self) -> bytes:
        return generate_latest(self._registry)

    async def own_page(self) -> bytes:
        return self.page()

    @property
    def all_rejections(self) -> dict[str, int]:
        return self.rejections | self.service.queue.rejections

    @property
    def stats(self) -> EngineMetrics | None:
        return self.service.client.stats

    def collect(self) -> Iterator[Metric]:
        for kind, name, place, text in _ROWS:
            value: Any = self
            for attribute in place.split("."):
                value = None if value is None else getattr(value, attribute)
            value = value() if callable(value) else value
            if value is not None:
                yield self._metric(*kind.partition(" ")[::2], name, text, value)
        engine = self.service.client.engine
        if engine is not None and self.service.running:
            yield self._cache_config(engine.config)

    def _metric(self, kind: str, label: str, name: str, text: str, value: Any) -> Metric:
        """Return a metric. With a `label`, the value has one for each label, or for each index."""
        if kind == "histogram":
            histogram = HistogramMetricFamily(name, text, labels=LABELS)
            histogram.add_metric(self._labels, value.buckets(), value.sum)
            return histogram
        if not label:
            family = _FAMILIES[kind](name, text, labels=LABELS)
            family.add_metric(self._labels, value)
            return cast(Metric, family)
        family = _FAMILIES[kind](name, text, labels=(*LABELS, label))
        for key, count in value.items() if isinstance(value, dict) else enumerate(value):
            family.add_metric((*self._labels, str(key)), count)
        return cast(Metric, family)

    def _cache_config(self, config: SchedulerConfig) -> Metric:
        """Return a metric whose labels are the configuration. As in vLLM, `num_gpu_blocks` is the
        number of KV blocks also on a CPU."""
        values = {
            "block_size": config.block_size,
            "num_gpu_blocks": config.num_blocks,
            "kv_cache_size_tokens": config.num_blocks * config.block_size,
            "enable_prefix_caching": config.enable_prefix_caching,
        }
        text = "Configuration of the KV cache."
        family = GaugeMetricFamily("vllm:cache_config_info", text, labels=(*LABELS, *values))
        family.add_metric((*self._labels, *map(str, values.values())), 1)
        return family


class FleetPages(Collector):
    """Collects the replicas' metrics from `pages`, which are (name, page) pairs. A replica's name
    becomes a label of its series."""

    def __init__(self, pages: Iterable[tuple[str, bytes]]) -> None:
        self._pages = list(pages)

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for replica, page in self._pages:
            for family in text_string_to_metric_families(page.decode()):
                family_of_all = merged.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {LABEL: replica, **sample.labels}
                    family_of_all.samples.append(sample._replace(labels=labels))
        yield from merged.values()


def merge(pages: Iterable[tuple[str, bytes]]) -> bytes:
    registry = CollectorRegistry()
    registry.register(FleetPages(pages))
    return generate_latest(registry)
