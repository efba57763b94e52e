"""A whole engine without a model in one object: scheduler, shadow-checking executor, step loop."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from cbatch.core.prices.step_work import StepSample, StepWork
from cbatch.core.request.request import FinishReason, Request, SamplingParams
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.events import Event
from cbatch.core.scheduler.plan import StepPlan
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.scheduler.sequence import Commit, Finished
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.engine.loop import StepLoop
from cbatch.kv_events.wire import encode_changes
from tests.checking.clock import VirtualClock
from tests.checking.executor import SimExecutor
from tests.checking.follower import Follower, cached_prefixes
from tests.checking.invariants import check_scheduler
from tests.checking.language import reference_output
from tests.checking.models import ModelledAcceptance

VOCAB_SIZE = 1000


def decoding(
    rows: int, context_tokens: int = 0, *, depth: int = 0, drafts: int | None = None, **more: int
) -> StepWork:
    """Return a step of decoding rows alone. They read `context_tokens` in total, and draft `depth`
    tokens each, or `drafts` in total."""
    drafts = rows * depth if drafts is None else drafts
    fields = {
        "rows": rows,
        "decode_rows": rows,
        "target_tokens": rows + drafts,
        "logit_tokens": rows + drafts,
        "context_tokens": context_tokens,
        "decode_pairs": context_tokens,
        "draft_depth": depth,
        "draft_tokens": drafts,
    }
    return StepWork(**(fields | more))


def prefilling(chunks: int, tokens: int, history: int = 0, **more: int) -> StepWork:
    """Return a step of equal chunks, each of some tokens after a history."""
    fields = {
        "rows": chunks,
        "target_tokens": chunks * tokens,
        "prefill_tokens": chunks * tokens,
        "logit_tokens": chunks,
        "context_tokens": chunks * (history + tokens),
        "prefill_context_tokens": chunks * (history + tokens),
        "prefill_pairs": chunks * (history * tokens + tokens * (tokens + 1) // 2),
    }
    return StepWork(**(fields | more))


class DraftedRows(msgspec.Struct):
    """A `policy.DraftedStep`."""

    rows: slice | np.ndarray
    num_drafted: np.ndarray
    num_accepted: np.ndarray
    measured: StepSample | None = None
    evidence: np.ndarray | None = None
    total_caught_up: int = 0
    unanswered: int = 0

    @property
    def total_planned(self) -> int:
        return self.total_drafted + self.unanswered

    @property
    def total_drafted(self) -> int:
        return int(self.num_drafted.sum())

    @property
    def has_chunks(self) -> bool:
        work = None if self.measured is None else self.measured.work
        return work is not None and work.target_tokens > work.logit_tokens

    def sample(self) -> StepSample:
        assert self.measured is not None
        return self.measured


class RowsToPlan(msgspec.Struct):
    """A `policy.PlannedRows`."""

    rows: slice | np.ndarray
    max_drafts: np.ndarray
    budget_tokens: int = 2**20
    behind: np.ndarray | None = None
    num_prompts: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.max_drafts)

    @property
    def draft_kv_lag(self) -> np.ndarray:
        return np.zeros(self.num_rows, np.int32) if self.behind is None else self.behind

    @property
    def context_tokens(self) -> int:
        return 0

    @property
    def remaining_tokens(self) -> np.ndarray:
        return self.draft_kv_lag + 1


def make_config(**overrides: Any) -> SchedulerConfig:
    """Return a configuration with small sizes. `lookahead="fixed:3"` (or "ema:4", "off") is short
    for a LookaheadConfig."""
    lookahead = overrides.pop("lookahead", "off")
    if isinstance(lookahead, str):
        policy, _, k = lookahead.partition(":")
        lookahead = LookaheadConfig(policy=policy, k=int(k or 4))
    settings: dict[str, Any] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_model_len": 128,
        "max_num_batched_tokens": 64,
        "vocab_size": VOCAB_SIZE,
        "decode_reserve_tokens": 4,
        "draft_context_tokens": None if lookahead.policy == "off" else 128,
        "lookahead": lookahead,
    }
    return SchedulerConfig(**(settings | overrides))


def make_request(
    name: str, prompt: int | Iterable[int] = 8, *, seed: int = 0, choice: int = 0, **params: Any
) -> Request:
    """Return a request. `prompt` is its token ids, or a number of tokens that no other name
    shares."""
    if isinstance(prompt, int):
        rng = np.random.default_rng([ord(c) for c in name])
        prompt = rng.integers(0, VOCAB_SIZE, prompt).tolist()
    fields = ("priority", "cache_salt", "itl_target_s")
    named = {field: params.pop(field) for field in fields if field in params}
    return Request(
        request_id=name,
        prompt=tuple(prompt),
        params=SamplingParams(**params),
        seed=seed,
        choice=choice,
        **named,
    )


class RecordingExecutor(SimExecutor):
    """An executor that records its plans."""

    plans: list[StepPlan]

    def submit(self, plan: StepPlan) -> None:
        self.__dict__.setdefault("plans", []).append(plan)
        super().submit(plan)


class World:
    """An engine that is stepped by hand; it checks every invariant, and all that the caller sees,
    after each commit."""

    def __init__(
        self,
        config: SchedulerConfig | None = None,
        *,
        depth: int = 0,
        log: Any = None,
        acceptance: Any = None,
        faults: Any = None,
        cost: Any = None,
    ) -> None:
        self.config = config or make_config()
        self.clock = VirtualClock()
        self.events: list[Event] = []
        self.scheduler = Scheduler(self.config, log or self.events.append)
        self.executor = RecordingExecutor.of(
            self.config,
            clock=self.clock,
            acceptance=acceptance or ModelledAcceptance(0.7),
            faults=faults,
            cost=cost,
        )
        self.executor.plans = []
        self.loop = StepLoop(self.scheduler, self.executor, clock=self.clock, depth=depth)
        self.requests: dict[str, Request] = {}
        self.shown: defaultdict[str, list[int]] = defaultdict(list)
        self.finished: dict[str, Finished] = {}
        self.commits: list[Commit] = []
        self.follower = Follower()

    @property
    def plans(self) -> list[StepPlan]:
        return self.executor.plans

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request, self.clock())
            self.requests[request.request_id] = request

    def step(self) -> Commit | None:
        commit = self.loop.step()
        check_scheduler(self.scheduler)
        self.follow()
        if commit is not None:
            self.commits.append(commit)
            for row in commit.updates():
                assert row.request_id not in self.finished, f"{row.request_id}: after its end"
                assert 0 <= row.num_accepted <= row.num_drafted
                self.shown[row.request_id].extend(row.tokens)
            self.end(commit.finished)
        self.end(self.scheduler.take_finished())
        return commit

    def follow(self) -> None:
        """Check that a follower of the events knows the contents of the prefix cache."""
        changes = self.scheduler.take_cache_changes()
        if changes:
            self.follower.take(encode_changes(changes, 0.0, self.config.block_size))
        if self.config.kv_events:
            salts = {request.cache_salt: None for request in self.requests.values()}
            assert self.follower.prefixes == cached_prefixes(self.scheduler.state.pool, salts)

    def run(self, max_steps: int = 3000) -> dict[str, Finished]:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, "requests are left over"
        self.end(self.scheduler.take_finished())
        assert set(self.finished) == set(self.requests)
        return self.finished

    def end(self, finished: tuple[Finished, ...]) -> None:
        for end in finished:
            name = end.request_id
            assert name in self.requests and name not in self.finished, f"{name} ended twice"
            self.finished[name] = end
            shown = self.shown[name]
            output = end.output.tolist()
            assert shown[: len(output)] == output, f"{name}: its output is not what it showed"

    def output(self, name: str) -> list[int]:
        return self.finished[name].output.tolist()

    def reference(self, name: str) -> tuple[list[int], FinishReason]:
        """Return the output of the request served alone."""
        return reference_output(
            self.requests[name],
            vocab_size=self.config.vocab_size,
            eos_ids=self.config.eos_ids,
            max_model_len=self.config.max_sequence_tokens,
        )

    def assert_reference(self, *names: str) -> None:
        """Check that these (or all) requests ended by themselves, with exactly their reference
        output."""
        for name in names or tuple(self.requests):
            expected, reason = self.reference(name)
            assert self.output(name) == self.shown[name] == expected, name
            assert self.finished[name].reason is reason, name


def rows_of(world: World, plan: StepPlan) -> dict[str, dict[str, int]]:
    """Return the rows of a recorded plan by request id; every admission so far must be recorded
    too."""
    names: dict[int, str] = {}
    for earlier in world.plans:
        for admission in earlier.deltas.new_sequences:
            names[admission.generation * world.config.max_num_seqs + admission.slot] = (
                admission.request_id
            )
        if earlier is plan:
            break
    keys = plan.generations * world.config.max_num_seqs + plan.slots
    return {
        names[int(key)]: {
            "query_len": int(plan.query_lens[i]),
            "num_drafts": int(plan.num_drafts[i]),
            "catch_up": int(plan.catch_up[i]),
            "wants_logits": int(plan.wants_logits[i]),
        }
        for i, key in enumerate(keys.tolist())
    }
