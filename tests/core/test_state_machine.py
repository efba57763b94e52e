"""Hypothesis drives scheduler, pool and loop with all possible events, at depth 0 and 1.

After every commit the scheduler checks its invariants, and the executor's shadow has checked every
KV position that was read. At the end each request has ended exactly once. Those that no event
disturbed have the same output as when served alone.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from cbatch.core.request.errors import RefusedError
from cbatch.core.request.request import FinishReason
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.slot_pages import pages_per_slot
from cbatch.core.speculation.config import LookaheadConfig
from tests.checking.executor import Faults
from tests.checking.invariants import check_scheduler
from tests.checking.models import ModelledAcceptance
from tests.helpers import World, make_request

HAPPENED: Counter[str] = Counter()  # over all examples
SMALL_VOCAB = 40  # so that stop ids and shared prefixes come up by chance
CHAINS = (("model",), ("suffix", "model"), ("model", "ngram"), ("suffix",))
NATURAL = (FinishReason.STOP, FinishReason.LENGTH)


@st.composite
def configs(draw):
    max_num_seqs = draw(st.integers(1, 5))
    policy = draw(st.sampled_from(["fixed", "fixed", "ema", "adaptive", "off"]))
    draft_context = draw(st.sampled_from([64, 64, 20, None]))
    chains = [None, ("suffix",), ("ngram", "suffix")]
    if draft_context is not None:
        chains += [("suffix", "model"), ("model", "ngram")]
    enable_prefix_caching = draw(st.booleans())
    block_size, k = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    pages = pages_per_slot(k, block_size)  # of one sequence; a state page more or less matters
    return SchedulerConfig(
        num_state_pages=draw(st.sampled_from([0, pages, 3 * pages, 60, 60])),
        state_interval=draw(st.integers(1, 5)),
        num_blocks=draw(st.one_of(st.integers(2, 12), st.just(40))),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=draw(st.integers(8, 64)),
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 40)),
        vocab_size=SMALL_VOCAB,
        eos_ids=draw(st.sampled_from([(), (3,)])),
        queue_policy=draw(st.sampled_from(["fcfs", "priority", "shortest"])),
        ageing_per_s=draw(st.sampled_from([None, 0.0, 2.0, 1000.0])),
        enable_prefix_caching=enable_prefix_caching,
        kv_events=enable_prefix_caching and draw(st.booleans()),
        decode_reserve_tokens=draw(st.integers(1, 8)),
        draft_context_tokens=draft_context,
        drafter=draw(st.sampled_from(chains)),
        lookahead=LookaheadConfig(policy=policy, k=k),
    )


fault_runs = st.frozensets(st.integers(0, 60), max_size=6)
token_ids = st.integers(0, SMALL_VOCAB - 1)
prefixes = st.sampled_from([(), tuple(range(8)), tuple(range(20)), (1,) * 13])
few_tokens = st.lists(token_ids, max_size=10).map(tuple)


@st.composite
def sampling(draw):
    max_tokens = draw(st.integers(1, 20))
    return {
        "max_tokens": max_tokens,
        "min_tokens": draw(st.integers(0, max_tokens)),
        "stop_token_ids": draw(st.sampled_from([(), (), (5,), (6, 7)])),
        "ignore_eos": draw(st.booleans()),
        "max_lookahead": draw(st.sampled_from([None, None, 0, 1, 3])),
        "drafter": draw(st.sampled_from([None, None, *CHAINS])),
        "priority": draw(st.integers(-2, 2)),
    }


class Serving(RuleBasedStateMachine):
    depth = 0
    world: World

    @initialize(config=configs(), faults=fault_runs)
    def start(self, config, faults):
        self.acceptance = {}
        self.non_finite = {}
        self.draft_non_finite = {}
        self.disturbed = set()
        self.count = 0
        self.world = World(
            config,
            depth=self.depth,
            acceptance=ModelledAcceptance(0.7, self.acceptance),
            faults=Faults(
                raise_at_runs=faults,
                non_finite_at=self.non_finite,
                draft_non_finite_at=self.draft_non_finite,
            ),
        )

    def _add(self, prompt, params, acceptance, choice=0):
        has_draft_model = self.world.config.draft_context_tokens is not None
        if not has_draft_model and "model" in (params["drafter"] or ()):
            params = params | {"drafter": None}  # the engine refuses it
        name = f"r{self.count}"
        self.count += 1
        self.acceptance[name] = acceptance
        request = make_request(name, prompt, seed=self.count - choice, choice=choice, **params)
        try:
            self.world.add(request)
        except RefusedError:
            assert len(prompt) >= self.world.config.max_sequence_tokens
            return None
        return name

    @rule(
        prefix=prefixes,
        rest=few_tokens,
        params=sampling(),
        acceptance=st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0]),
        choices=st.integers(1, 3),
    )
    def add(self, prefix, rest, params, acceptance, choices):
        prompt = prefix + rest
        assume(prompt)
        for choice in range(choices):
            self._add(prompt, params, acceptance, choice)

    @rule(prefix=prefixes, params=sampling(), count=st.integers(2, 6))
    def burst(self, prefix, params, count):
        for i in range(count):
            self._add((*prefix, i), params, 0.7)

    @rule(params=sampling(), at=st.integers(0, 6))
    def add_one_that_overflows(self, params, at):
        """Its logits are not finite at output token `at`."""
        self.non_finite[f"r{self.count}"] = at
        name = self._add(tuple(range(9)), params, 0.7)
        if name is not None:
            self.disturbed.add(name)

    @rule(params=sampling(), at=st.frozensets(st.integers(0, 12), min_size=1, max_size=4))
    def add_one_with_a_bad_draft(self, params, at):
        self.draft_non_finite[f"r{self.count}"] = at
        self._add(tuple(range(7)), params, 0.9)

    @rule(extra=st.integers(0, 3))
    def add_one_that_is_too_long(self, extra):
        limit = self.world.config.max_sequence_tokens
        assert self._add((1,) * (limit + extra), {"drafter": None}, 0.5) is None

    @precondition(lambda self: self.world.scheduler.has_work)
    @rule(count=st.integers(1, 5))
    def step(self, count):
        for _ in range(count):
            self.world.step()

    @precondition(lambda self: self.count > 0)
    @rule(data=st.data())
    def cancel(self, data):
        name = self._pick(data)
        open_ = name in self.world.requests and name not in self.world.finished
        assert self.world.scheduler.cancel(name, self.world.clock()) == open_
        self._disturb(name)

    @precondition(lambda self: self.count > 0)
    @rule(data=st.data())
    def text_finish(self, data):
        name = self._pick(data)
        open_ = name in self.world.requests and name not in self.world.finished
        if not open_:
            return
        keep = data.draw(st.integers(0, len(self.world.shown[name])))
        assert self.world.scheduler.finish(name, keep, self.world.clock())
        self._disturb(name)

    def _pick(self, data):
        return f"r{data.draw(st.integers(0, self.count - 1))}"

    def _disturb(self, name):
        self.disturbed.add(name)
        check_scheduler(self.world.scheduler)
        self.world.end(self.world.scheduler.take_finished())
        self.world.follow()

    @rule(seconds=st.sampled_from([0.0, 0.01, 5.0]))
    def wait(self, seconds):
        self.world.clock.advance(seconds)

    def teardown(self):
        if not hasattr(self, "world"):
            return
        world = self.world
        world.run()
        self._count(world)
        assert world.scheduler.num_waiting == world.scheduler.num_running == 0
        for name, end in world.finished.items():
            expected, reason = world.reference(name)
            output = end.output.tolist()
            assert output == expected[: len(output)], name
            faulted = end.reason is FinishReason.ERROR and "executor failed" in end.message
            if name not in self.disturbed and not faulted:
                assert (output, end.reason) == (expected, reason), name
            if end.reason in NATURAL and name not in self.disturbed:
                assert output == world.shown[name]

    def _count(self, world):
        stats, executor = world.scheduler.stats, world.executor.stats
        prefix = f"depth {self.depth} "
        for what, count in (
            ("preemptions", stats.preemptions),
            ("prefix hits", stats.prefix_hit_tokens),
            ("executor resets", stats.executor_resets),
            ("rejections", executor.num_rejections),
            ("full acceptances", executor.num_full_acceptances),
            ("mixed steps", executor.num_mixed_steps),
            ("catch-up tokens", executor.catch_up_tokens),
            ("rows drafted by the model", executor.rows_by_drafter["model"]),
            ("rows drafted by a lookup", executor.rows_by_drafter["suffix"]),
            ("kv events", sum(world.follower.num_events.values())),
            ("state pages", sum(plan.deltas.state_pages.shape[1] for plan in world.plans)),
            (
                "hits with a page",
                sum(
                    new.state_page is not None
                    for plan in world.plans
                    for new in plan.deltas.new_sequences
                ),
            ),
            ("zeroed blocks", sum(len(plan.deltas.zeroed_blocks) for plan in world.plans)),
        ):
            HAPPENED[prefix + what] += count
        for end in world.finished.values():
            HAPPENED[prefix + end.reason.value] += 1


class Overlapped(Serving):
    depth = 1


SETTINGS = settings(
    max_examples=50,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestSerial, TestOverlapped = Serving.TestCase, Overlapped.TestCase
TestSerial.settings = TestOverlapped.settings = SETTINGS


def test_everything_happened():
    """All events that the state machines claim to cover occurred; the machines run before this
    test."""
    if not HAPPENED:
        pytest.skip("the state machines were not run")
    for depth in (0, 1):
        for what in (
            "preemptions",
            "prefix hits",
            "executor resets",
            "rejections",
            "full acceptances",
            "mixed steps",
            "catch-up tokens",
            "rows drafted by the model",
            "rows drafted by a lookup",
            "zeroed blocks",
            "state pages",
            "hits with a page",
            "kv events",
            *(reason.value for reason in FinishReason),
        ):
            assert HAPPENED[f"depth {depth} {what}"] > 10, what
