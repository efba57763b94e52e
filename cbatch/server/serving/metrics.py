"""Prometheus metrics: with vLLM's names where vLLM has the metric, else with cbatch's.

`RequestTotals` counts requests, tokens, times and drafts. Data that only the engine has (slots, KV,
prefix cache, steps) comes from the latest statistics, and is left out until the first arrive. The
engine's counters restart at 0 with the engine, which Prometheus' `rate()` allows for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.speculation.policy import PolicyStats
from cbatch.engine.core import EngineMetrics
from cbatch.server.serving.request_record import RequestTotals
from cbatch.server.serving.service import EngineService

if TYPE_CHECKING:
    from cbatch.kv_events.publisher import KVEventPublisher


from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families

LABELS = ("model_name", "engine")


class Metrics(RequestTotals, Collector):
    """The metrics of one served model, in addition to the totals of its requests."""

    def __init__(self, model: str, service: EngineService) -> None:
        super().__init__()
        self._labels, self._service = (model, "0"), service
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def page(self) -> bytes:
        """Return the page in Prometheus' text format."""
        return generate_latest(self._registry)

    async def own_page(self) -> bytes:
        """Return the page of a server without other replicas."""
        return self.page()

    def collect(self) -> Iterator[Metric]:
        yield from self._request_metrics()
        yield from self._histograms()
        yield from self._queue_metrics()
        if self._service.kv_events is not None:
            yield from self._kv_event_metrics(self._service.kv_events)
        engine = self._service.client.engine
        if engine is not None and self._service.running:
            yield self._cache_config(engine.config)
        if self._service.client.stats is not None:
            yield from self._engine_metrics(self._service.client.stats)

    # ---- inside -------------------------------------------------------------------------------

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*LABELS, label))
        for key, value in values.items():
            family.add_metric((*self._labels, key), value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _request_metrics(self) -> Iterator[Metric]:
        yield self._counter(
            "vllm:prompt_tokens", "Prompt tokens of accepted requests.", self.prompt_tokens
        )
        text = "Generated tokens."
        yield self._counter("vllm:generation_tokens", text, self.generation_tokens)
        text = "Finished sequences, by reason."
        yield self._counters("vllm:request_success", text, "finished_reason", self.endings)
        text, of_queue = "Rejected calls, by reason.", self._service.queue.rejections
        refused = self.rejections | of_queue
        yield self._counters("vllm:admission_rejections", text, "reason", refused)
        drafting = self.drafting
        for name, text, value in (
            ("drafts", "Verifications of drafts, one per sequence and step.", drafting.steps),
            ("draft_tokens", "Drafted tokens.", drafting.drafted_tokens),
            ("accepted_tokens", "Accepted drafts.", drafting.accepted_tokens),
        ):
            yield self._counter(f"vllm:spec_decode_num_{name}", text, value)
        by_position = {str(i): count for i, count in enumerate(drafting.accepted_at())}
        name, text = "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted drafts, by position."
        yield self._counters(name, text, "position", by_position)
        wasted, text = drafting.drafted_tokens - drafting.accepted_tokens, "Rejected drafts."
        yield self._counter("cbatch:wasted_verify_tokens", text, wasted)

    def _histograms(self) -> Iterator[Metric]:
        for name, text, histogram in (
            ("vllm:time_to_first_token_seconds", "From call to first token.", self.first_token_s),
            (
                "vllm:inter_token_latency_seconds",
                "Between outputs of successive steps.",
                self.inter_token_s,
            ),
            (
                "vllm:request_time_per_output_token_seconds",
                "Mean time per token after the first.",
                self.per_token_s,
            ),
            ("vllm:request_queue_time_seconds", "From call to slot.", self.queue_s),
            ("vllm:request_prefill_time_seconds", "From slot to first token.", self.prefill_s),
            ("vllm:request_decode_time_seconds", "From first to last token.", self.decode_s),
            ("vllm:request_inference_time_seconds", "From slot to last token.", self.inference_s),
            ("vllm:e2e_request_latency_seconds", "From call to last token.", self.e2e_s),
            ("vllm:request_prompt_tokens", "Prompt tokens per sequence.", self.prompt),
            ("vllm:request_generation_tokens", "Output tokens per sequence.", self.generation),
            ("vllm:request_params_n", "Choices per prompt (n).", self.choices),
            ("vllm:request_params_max_tokens", "Requested max_tokens.", self.max_tokens),
            (
                "cbatch:lookahead_tokens",
                "Drafts per sequence and decoding step (k).",
                self.lookahead,
            ),
        ):
            family = HistogramMetricFamily(name, text, labels=LABELS)
            family.add_metric(self._labels, histogram.buckets(), histogram.sum)
            yield family

    def _queue_metrics(self) -> Iterator[Metric]:
        service = self._service
        text = "Accepted sequences that wait for their first slot."
        yield self._gauge("cbatch:queued_requests", text, service.queue.num_requests)
        text = "Prompt tokens of calls that wait for their first slot."
        yield self._gauge("cbatch:queued_prompt_tokens", text, service.queue.num_prompt_tokens)
        text = "Estimated seconds until all received prompts are computed."
        yield self._gauge(
            "cbatch:estimated_prompt_seconds", text, service.queue.estimated_prefill_s()
        )
        text = "Open calls, including those whose prompt or grammar is still processed."
        yield self._gauge("cbatch:open_calls", text, service.num_open)
        text = "Restarts of the engine process."
        yield self._counter("cbatch:engine_restarts", text, service.client.num_restarts)

    def _kv_event_metrics(self, events: KVEventPublisher) -> Iterator[Metric]:
        text = "Batches of KV events, sent or dropped."
        yield self._counter("cbatch:kv_event_batches", text, events.num_published)
        text = "Batches of KV events dropped because the queue was full."
        yield self._counter("cbatch:kv_event_batches_dropped", text, events.num_dropped)

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

    def _engine_metrics(self, stats: EngineMetrics) -> Iterator[Metric]:
        kv_usage = 1 - (stats.free_blocks + stats.cached_blocks) / stats.num_blocks
        for name, text, value in (
            ("vllm:num_requests_running", "Sequences in a slot.", stats.num_running),
            ("vllm:num_requests_waiting", "Sequences that wait for a slot.", stats.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks in use (0 to 1).", kv_usage),
        ):
            yield self._gauge(name, text, value)
        totals = stats.totals
        for name, text, value in (
            ("vllm:num_preemptions", "Preemptions.", totals.preemptions),
            (
                "vllm:prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                totals.prompt_tokens,
            ),
            (
                "vllm:prefix_cache_hits",
                "Prompt tokens found in the prefix cache.",
                totals.prefix_hit_tokens,
            ),
            (
                "vllm:prompt_tokens_cached",
                "Prompt tokens found in the prefix cache.",
                totals.prefix_hit_tokens,
            ),
            ("cbatch:steps", "Steps of the engine.", totals.steps),
            (
                "cbatch:executor_resets",
                "Recoveries from faults of the executor.",
                totals.executor_resets,
            ),
            ("cbatch:step_draft_seconds", "Time in drafters.", totals.draft_s),
            ("cbatch:step_target_seconds", "Time in the model.", totals.target_s),
            ("cbatch:step_plan_seconds", "Time in planning.", stats.plan_s),
            ("cbatch:step_commit_seconds", "Time in committing.", stats.commit_s),
            ("cbatch:step_seconds", "Time in steps, planning included.", stats.step_s),
        ):
            yield self._counter(name, text, value)
        if stats.policy is not None:
            yield from self._policy_metrics(stats.policy)

    def _policy_metrics(self, policy: PolicyStats) -> Iterator[Metric]:
        yield self._gauge(
            "cbatch:lookahead_on", "1 if the lookahead policy drafts, else 0.", policy.drafting
        )
        for name, text, value in (
            (
                "lambda",
                "Minimum survival probability at which a draft pays at this load.",
                policy.threshold,
            ),
            (
                "expected_tokens_per_second",
                "Expected tokens per second of the chosen drafts.",
                policy.tokens_per_s,
            ),
            ("expected_gain", "Expected gain over no drafts (0: none).", policy.gain),
        ):
            if value is not None:
                yield self._gauge(f"cbatch:lookahead_{name}", text, value)
        calibration = policy.calibration
        for name, text, values in (
            ("drafts", "Drafts in observed steps.", calibration.drafted),
            (
                "predicted",
                "Drafts in observed steps that were expected to survive.",
                calibration.predicted,
            ),
            ("observed", "Drafts in observed steps that survived.", calibration.survived),
        ):
            by_position = {str(i): value for i, value in enumerate(values)}
            yield self._counters(f"cbatch:survival_{name}", text, "position", by_position)


LABEL = "replica"


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
    """Return one page in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(FleetPages(pages))
    return generate_latest(registry)
