"""The CPU executor and the GPU executor run every step of an engine in parallel; results and kept
state must be equal."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from cbatch.core.request.request import Request
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.plan import RowStatus, StepPlan, StepResult
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.engine.loop import StepLoop
from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.cpu.drafters.draft_model import DraftModel
from cbatch.runtime.cpu.drafters.kinds import drafter_of
from cbatch.runtime.cpu.executor import TorchExecutor
from cbatch.runtime.drafting.chain import ChainDrafter
from cbatch.runtime.drafting.contract import Drafter
from cbatch.runtime.drafting.lookup import LookupDrafter
from cbatch.runtime.gpu import device_steps
from cbatch.runtime.gpu.decoder import Decoder
from cbatch.runtime.gpu.device import CudaDevice
from cbatch.runtime.gpu.executor import GpuExecutor
from cbatch.runtime.gpu.host_drafts import LookupSettings
from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.sampling.structured import GrammarSource
from tests.checking.invariants import check_scheduler
from tests.runtime.engines import NoisyWeights, parse_lookahead, tiny_config

CPU = torch.device("cpu")
BLOCK_SIZE = 16


class Captures(CudaDevice):
    """A device that captures a step when it first meets it: capturing all steps ahead would take
    long here."""

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        self.deferred = (key,)
        super().run(key, function)


class Pair:
    """A tiny model for either executor, from the same numbers."""

    def __init__(
        self, *, seed: int = 1, noise: float = 0.0, poison: int | None = None, **changes: Any
    ) -> None:
        config: ModelConfig = tiny_config(head_dim=16, **changes)
        config = config.with_feed_forwards(bias=changes.get("mlp_bias", False))
        source = NoisyWeights(seed, noise, poison)
        self.config = config
        self.model = Model(config, source, torch.float32, "fast")
        self.decoder = Decoder(config, source, torch.float32, CPU)


class Differs(BaseException):
    """A difference. No `Exception`: the step loop would recover."""


class Twins:
    """Executors of both kinds for `StepLoop`. `seen` counts events."""

    def __init__(
        self,
        target: Pair,
        draft: Pair | None,
        config: SchedulerConfig,
        *,
        lookups: LookupSettings | None = None,
        grammars: GrammarSource | None = None,
        **settings: Any,
    ) -> None:
        drafter: Drafter | None = None if draft is None else drafter_of(draft.model)
        if lookups is not None:
            drafter = ChainDrafter(
                model=None if draft is None else drafter_of(draft.model),
                lookups={name: LookupDrafter(each) for name, each in lookups.lookups.items()},
                default=lookups.default,
            )
        self.cpu = TorchExecutor(
            target.model,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            drafter=drafter,
            grammars=grammars,
        )
        settings = settings | {"lookups": lookups, "grammars": grammars}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_steps, "device_for", lambda device: Captures(CPU))
            self.gpu = self._gpu_executor(target, draft, config, settings)
        self.seen: Counter[str] = Counter()
        self._expected: deque[tuple[StepPlan, StepResult]] = deque()
        self._held: set[int] = set()

    @staticmethod
    def _gpu_executor(
        target: Pair, draft: Pair | None, config: SchedulerConfig, settings: dict[str, Any]
    ) -> GpuExecutor:
        return GpuExecutor(
            target.decoder,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_sequence_tokens=config.max_sequence_tokens,
            max_num_batched_tokens=config.max_num_batched_tokens,
            draft=None if draft is None else draft.decoder,
            max_drafts=config.lookahead.k,
            **settings,
        )

    def check(self, request: Request) -> None:
        self.cpu.check(request)
        self.gpu.check(request)

    def run(self, plan: StepPlan) -> StepResult:
        self.submit(plan)
        return self.wait()

    def submit(self, plan: StepPlan) -> None:
        self._notice(plan)
        self._expected.append((plan, self.cpu.run(plan)))
        self.gpu.submit(plan)

    def wait(self) -> StepResult:
        plan, expected = self._expected.popleft()
        result = self.gpu.wait()
        try:
            self._compare(plan, result, expected)
            if not self._expected:
                self._compare_slots(plan.slots, result)
        except AssertionError as difference:
            raise Differs(str(difference)) from difference
        self._notice_result(plan, result)
        return result

    def reset(self) -> None:
        self._expected.clear()
        self.cpu.reset()
        self.gpu.reset()

    def _compare(self, plan: StepPlan, actual: StepResult, expected: StepResult) -> None:
        for name in ("tokens", "row_splits", "num_drafted", "num_accepted", "status"):
            mine, reference = getattr(actual, name), getattr(expected, name)
            assert mine.dtype == reference.dtype, name
            assert mine.tolist() == reference.tolist(), (plan.step_id, name)
        assert actual.step_id == expected.step_id
        assert actual.generations is plan.generations
        assert _listed(actual.draft_kv_lens) == _listed(expected.draft_kv_lens)
        assert actual.draft_s >= 0 and actual.target_s > 0
        assert len(actual.logprobs) == len(expected.logprobs)
        for mine, reference in zip(actual.logprobs, expected.logprobs, strict=True):
            assert (mine.slot, mine.first_position) == (reference.slot, reference.first_position)
            np.testing.assert_allclose(mine.chosen, reference.chosen, rtol=1e-4, atol=1e-4)
            assert mine.top_ids.tolist() == reference.top_ids.tolist()
            np.testing.assert_allclose(mine.top, reference.top, rtol=1e-4, atol=1e-4)

    def _compare_slots(self, slots: np.ndarray, actual: StepResult) -> None:
        """Compare the state of a step's slots, rejected drafts too, once nothing is in flight."""
        table, state = self.cpu.table, self.gpu.state
        tails = np.maximum(actual.num_drafted - np.diff(actual.row_splits), 0)
        for slot, tail in zip(slots.tolist(), tails.tolist(), strict=True):
            if table.failed[slot] == RowStatus.NO_TOKEN:  # only the host knows
                continue
            known = int(table.num_tokens[slot])
            assert int(state.num_tokens[slot]) == known
            stop = known + tail
            assert state.tokens[slot, :stop].tolist() == table.tokens[slot, :stop].tolist()
            assert int(state.kv_len[slot]) == table.kv_len[slot]
            if self.cpu.drafter is not None:
                kv_lens = self.cpu.drafter.kv_lens(np.array([slot]))
                if isinstance(self.cpu.drafter, DraftModel):
                    kv_lens = self.cpu.drafter.kv_len[[slot]]
                if kv_lens is not None:
                    assert int(state.draft_kv_len[slot]) == kv_lens[0]

    def _notice(self, plan: StepPlan) -> None:
        drafts, chunks = plan.num_drafts, plan.query_lens - plan.num_drafts > 1
        self.seen["blocks zeroed"] += len(plan.deltas.zeroed_blocks)
        for a in plan.deltas.new_sequences:
            self.seen["slots used again"] += a.slot in self._held
            self._held.add(a.slot)
            self.seen["resumed"] += len(a.tokens) > a.num_prompt_tokens
            self.seen["prefix hits"] += a.kv_len_tokens > 0
        self.seen["plans in flight"] += bool(self._expected)
        self.seen["mixed steps"] += bool((drafts > 0).any() and chunks.any())
        self.seen["unfinished chunks"] += int((~plan.wants_logits).sum())
        self.seen["ragged k"] += len(set(drafts[plan.wants_logits].tolist())) > 1
        self.seen["slices"] += int(((drafts == 0) & (plan.catch_up > 0)).sum())
        self.seen["catch-ups"] += int(((drafts > 0) & (plan.catch_up > 0)).sum())

    def _notice_result(self, plan: StepPlan, result: StepResult) -> None:
        drafted, accepted = result.num_drafted, result.num_accepted
        self.seen["drafted"] += int(drafted.sum())
        self.seen["accepted"] += int(accepted.sum())
        self.seen["all accepted"] += int(((drafted > 1) & (accepted == drafted)).sum())
        self.seen["rejected"] += int((accepted < drafted).sum())
        self.seen["drafted fewer"] += int((drafted < plan.num_drafts).sum())
        self.seen["target not finite"] += int((result.status == RowStatus.NON_FINITE).sum())
        broken = result.status == RowStatus.DRAFT_NON_FINITE
        self.seen["draft not finite"] += int(broken.sum())
        self.seen["drafts before a break"] += int(drafted[broken].sum())
        self.seen["no token"] += int((result.status == RowStatus.NO_TOKEN).sum())
        self.seen["log probabilities"] += sum(len(entry.chosen) for entry in result.logprobs)
        emitted = np.diff(result.row_splits)
        self.seen["void rows"] += int(((emitted == 0) & plan.wants_logits).sum())


class LateTwins(Twins):
    """Twins whose drafts are a step late, so that only the final output equals the CPU's."""

    def submit(self, plan: StepPlan) -> None:
        self._notice(plan)
        self._expected.append((plan, None))  # type: ignore[arg-type]
        self.gpu.submit(plan)

    def wait(self) -> StepResult:
        plan, _ = self._expected.popleft()
        result = self.gpu.wait()
        self._notice_result(plan, result)
        return result


def run_twins(
    requests: Sequence[Request],
    target: Pair,
    draft: Pair | None = None,
    *,
    lookahead: str = "off",
    depth: int = 0,
    arrivals: Sequence[int] | None = None,
    num_blocks: int = 64,
    max_num_seqs: int = 4,
    num_faults: int = 0,
    tuning: Any = None,
    cancels: Mapping[str, int] | None = None,
    lookups: LookupSettings | None = None,
    grammars: GrammarSource | None = None,
    twins_kind: type[Twins] = Twins,
    **settings: Any,
) -> tuple[dict[str, list[int]], Counter[str]]:
    """Run `requests` to their ends; return outputs and counts of events.

    Request i enters before step `arrivals[i]`; `cancels` maps requests to the step before which
    they are cancelled.
    """
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_model_len=target.config.max_position_tokens,
        vocab_size=target.config.vocab_size,
        draft_context_tokens=None if draft is None else draft.config.max_position_tokens,
        lookahead=parse_lookahead(lookahead),
        drafter=None if lookups is None else lookups.default,
        **({"max_num_batched_tokens": 32, "decode_reserve_tokens": 4} | settings),
    )
    scheduler = Scheduler(config)
    twins = twins_kind(target, draft, config, tuning=tuning, lookups=lookups, grammars=grammars)
    loop = StepLoop(scheduler, twins, clock=time.monotonic, depth=depth)
    outputs: dict[str, list[int]] = {}
    due, step = sorted(zip(arrivals or [0] * len(requests), requests, strict=True), key=_first), 0
    while due or scheduler.has_work:
        while due and due[0][0] <= step:
            scheduler.add(due.pop(0)[1], time.monotonic())
        for name, end in (cancels or {}).items():
            if step == end:
                assert scheduler.cancel(name, time.monotonic())
        commit = loop.step()
        check_scheduler(scheduler)
        step += 1
        for end in commit.finished if commit is not None else ():
            outputs[end.request_id] = end.output.tolist()
    assert scheduler.stats.executor_resets == num_faults
    assert len(outputs) == len(requests)
    twins.seen["preemptions"] = scheduler.stats.preemptions
    return outputs, twins.seen


def _listed(array: np.ndarray | None) -> list[int] | None:
    return None if array is None else array.tolist()


def _first(pair: tuple[int, Request]) -> int:
    return pair[0]
