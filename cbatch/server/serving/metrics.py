"""Prometheus metrics: with vLLM's names where vLLM has the metric, else with cbatch's.

Requests, tokens, times and drafts are counted here, from the outputs that pass through. Data that
only the engine has (slots, KV, prefix cache, steps) is from its latest statistics, and left out
before the first. The engine's counters restart at 0 with the engine, which `rate()` allows for.
Counting takes a few additions, since it happens for every chunk of every stream.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

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
from cbatch.server.protocol.responses import CallMetrics, SpeculativeDecoding
from cbatch.server.serving.service import EngineService
from cbatch.text.outputs import Output

if TYPE_CHECKING:
    from cbatch.kv_events.publisher import KVEventPublisher

LABELS = ("model_name", "engine")
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
TOKENS = tuple(float(2**i) for i in range(18))
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
DRAFTS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 12.0, 16.0, 32.0)
REASONS = ("stop", "length", "abort", "error")
_REASON = {"cancelled": "abort"}  # vLLM's word for each of ours


class Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts by upper bound, as Prometheus expects."""
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
        return buckets


class DraftingCounts:
    """Counts of draft tokens and of accepted ones, over steps that drafted."""

    def __init__(self) -> None:
        self.accepted: list[int] = [0]  # [j]: steps that accepted j draft tokens
        self.steps = self.drafted_tokens = self.accepted_tokens = self.longest_tokens = 0

    def observe(self, drafted: int, accepted: int) -> None:
        if not drafted:
            return
        self.steps += 1
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted
        if drafted > self.longest_tokens:
            self.accepted += [0] * (drafted - self.longest_tokens)
            self.longest_tokens = drafted
        self.accepted[accepted] += 1

    def accepted_at(self) -> list[int]:
        """Return, at index i, the number of steps that accepted draft token i."""
        return [sum(self.accepted[i + 1 :]) for i in range(self.longest_tokens)]

    def report(self) -> SpeculativeDecoding | None:
        if not self.steps:
            return None
        return SpeculativeDecoding(
            acceptance_histogram=list(self.accepted),
            num_spec_steps=self.steps,
            num_spec_tokens=self.longest_tokens,
            mean_acceptance_length=1 + self.accepted_tokens / self.steps,
            draft_acceptance_rate=self.accepted_tokens / self.drafted_tokens,
            num_accepted_draft_tokens=self.accepted_tokens,
            num_draft_tokens=self.drafted_tokens,
        )


class Metrics(Collector):
    """The metrics of one served model. `clock` is in seconds."""

    def __init__(
        self, model: str, service: EngineService, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock = clock
        self._labels, self._service = (model, "0"), service
        self.prompt_tokens = self.generation_tokens = 0
        self.endings = dict.fromkeys(REASONS, 0)
        self.rejections: dict[str, int] = {}  # by reason
        self.drafting = DraftingCounts()
        self.first_token_s, self.between_s = Histogram(SECONDS), Histogram(SECONDS)
        self.per_token_s, self.whole_s = Histogram(SECONDS), Histogram(SECONDS)
        self.decode_s, self.queue_s = Histogram(SECONDS), Histogram(SECONDS)
        self.prefill_s, self.inference_s = Histogram(SECONDS), Histogram(SECONDS)
        self.choices, self.max_tokens = Histogram(CHOICES), Histogram(TOKENS)
        self.prompt, self.generation = Histogram(TOKENS), Histogram(TOKENS)
        self.lookahead = Histogram(DRAFTS)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def page(self) -> bytes:
        """Return the page in Prometheus' text format."""
        return generate_latest(self._registry)

    async def own_page(self) -> bytes:
        """Return the page of a server without other replicas."""
        return self.page()

    def reject(self, reason: str) -> None:
        self.rejections[reason] = self.rejections.get(reason, 0) + 1

    def collect(self) -> Iterator[Metric]:
        yield from self._counted()
        yield from self._timed()
        yield from self._queued()
        if self._service.kv_events is not None:
            yield from self._published(self._service.kv_events)
        if self._service.running:
            yield self._cache_config(self._service.config)
        if self._service.stats is not None:
            yield from self._engine_metrics(self._service.stats)

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

    def _counted(self) -> Iterator[Metric]:
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

    def _timed(self) -> Iterator[Metric]:
        for name, text, histogram in (
            ("vllm:time_to_first_token_seconds", "From call to first token.", self.first_token_s),
            (
                "vllm:inter_token_latency_seconds",
                "Between outputs of successive steps.",
                self.between_s,
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
            ("vllm:e2e_request_latency_seconds", "From call to last token.", self.whole_s),
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

    def _queued(self) -> Iterator[Metric]:
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
        yield self._counter("cbatch:engine_restarts", text, service.num_restarts)

    def _published(self, events: KVEventPublisher) -> Iterator[Metric]:
        text = "Batches of KV events, sent or dropped."
        yield self._counter("cbatch:kv_event_batches", text, events.num_published)
        text = "Batches of KV events dropped because the queue was full."
        yield self._counter("cbatch:kv_event_batches_dropped", text, events.num_dropped)

    def _cache_config(self, config: SchedulerConfig) -> Metric:
        """Return a metric whose labels hold the data. CPU blocks count as GPU blocks, as in
        vLLM."""
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


class SequenceTimes:
    """Times of one choice, in seconds by the metrics' clock."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.first_s = self.last_s = 0.0
        self.admitted_s: float | None = None  # when its prompt got a slot


class RequestMetrics:
    """Metrics of one API request, for its own report and for the totals."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began_s = metrics.clock()
        self._sequences: list[SequenceTimes] = []
        self._drafting = DraftingCounts()
        self._num_open = self._prompt_tokens = 0
        self._reasons: dict[str, None] = {}  # distinct reasons why its choices ended
        self.error: str | None = None  # the error that ended it after the response began

    def open(self, prompt_tokens: int, num_choices: int, max_tokens: int) -> None:
        """Count an accepted prompt."""
        self._metrics.choices.observe(num_choices)
        self._metrics.max_tokens.observe(max_tokens)
        self._metrics.prompt_tokens += prompt_tokens
        self._prompt_tokens += prompt_tokens
        self._num_open += num_choices
        for _ in range(num_choices):
            self._metrics.prompt.observe(prompt_tokens)

    def begin(self) -> SequenceTimes:
        """Start the times of a choice, at its first output."""
        self._sequences.append(SequenceTimes())
        return self._sequences[-1]

    def observe(self, sequence: SequenceTimes, output: Output, admitted_s: float | None) -> None:
        """Count an output. `admitted_s` is when the first choice of its prompt got a slot."""
        metrics, num_new = self._metrics, len(output.token_ids)
        if num_new:
            now_s = metrics.clock()
            if sequence.num_tokens:
                metrics.between_s.observe(now_s - sequence.last_s)
                metrics.lookahead.observe(output.num_drafted)
                metrics.drafting.observe(output.num_drafted, output.num_accepted)
                self._drafting.observe(output.num_drafted, output.num_accepted)
            else:
                sequence.first_s = now_s
                metrics.first_token_s.observe(now_s - self._began_s)
                if admitted_s is not None:
                    sequence.admitted_s = admitted_s
                    metrics.queue_s.observe(admitted_s - self._began_s)
                    metrics.prefill_s.observe(now_s - admitted_s)
            sequence.last_s = now_s
            sequence.num_tokens += num_new
            metrics.generation_tokens += num_new
        if output.finished is not None:
            reason = output.finished.finish_reason.value
            self._end(sequence, _REASON.get(reason, reason))

    def close(self) -> None:
        """Count the choices that have not finished as aborted."""
        if self._num_open:
            self._reasons["abort"] = None
        self._metrics.endings["abort"] += self._num_open
        self._num_open = 0

    def report(self) -> CallMetrics:
        begun = [times for times in self._sequences if times.num_tokens]
        if not begun:
            return CallMetrics(None, None, None)
        first_s = min(times.first_s for times in begun)
        last_s = max(times.last_s for times in begun)
        return CallMetrics(
            (first_s - self._began_s) * 1e3, (last_s - first_s) * 1e3, self._drafting.report()
        )

    def summary(self) -> dict[str, Any]:
        """Return fields of the log line. Times are in seconds; `acceptance` is a share of
        drafts."""
        begun = [times for times in self._sequences if times.num_tokens]
        drafted = self._drafting.drafted_tokens
        first_s = min((times.first_s for times in begun), default=None)
        return {
            "prompt_tokens": self._prompt_tokens,
            "output_tokens": sum(times.num_tokens for times in begun),
            "ttft_s": None if first_s is None else round(first_s - self._began_s, 4),
            "acceptance": round(self._drafting.accepted_tokens / drafted, 4) if drafted else None,
            "finish_reason": ",".join(self._reasons) or None,
        }

    def _end(self, sequence: SequenceTimes, reason: str) -> None:
        metrics, tokens = self._metrics, sequence.num_tokens
        self._reasons[reason] = None
        self._num_open -= 1
        metrics.endings[reason] = metrics.endings.get(reason, 0) + 1
        metrics.generation.observe(tokens)
        if tokens:
            metrics.whole_s.observe(sequence.last_s - self._began_s)
            metrics.decode_s.observe(sequence.last_s - sequence.first_s)
            if sequence.admitted_s is not None:
                metrics.inference_s.observe(sequence.last_s - sequence.admitted_s)
        if tokens > 1:
            metrics.per_token_s.observe((sequence.last_s - sequence.first_s) / (tokens - 1))
