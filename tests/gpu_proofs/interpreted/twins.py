"""The CPU executor and the GPU executor run every step of an engine in parallel; results and kept
state must be equal."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from cbatch.core.request.request import Request
from cbatch.core.scheduler.plan import RowStatus, StepPlan, StepResult
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
from cbatch.runtime.model.records import Recurrence
from tests.runtime.engines import NoisyWeights, run_engine, tiny_config

CPU = torch.device("cpu")
RESULTS = ("tokens", "row_splits", "num_drafted", "num_accepted", "status")


class Captures(CudaDevice):
    """A device that captures a step when it first meets it: capturing all steps ahead would take
    long here."""

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        self.deferred = (key,)
        super().run(key, function)


class Pair:
    """A tiny model for either executor, from the same numbers."""

    def __init__(
        self,
        noise: float = 0.0,
        *,
        poison: int | None = None,
        numerics: str = "fast",
        recurrence: Recurrence | None = None,
        **changes: Any,
    ) -> None:
        """`recurrence`: the mixer of the first layer, in place of attention."""
        config = tiny_config(head_dim=16, **changes)
        if recurrence is not None:
            first, *rest = config.layers
            recurrence = structs.replace(recurrence, norm=first.mixer.norm)
            first = structs.replace(first, mixer=recurrence)
            config = structs.replace(config, layers=(first, *rest))
        self.config = config.with_feed_forwards(bias=changes.get("mlp_bias", False))
        source = NoisyWeights(1, noise, poison)
        self.model = Model(self.config, source, torch.float32, "fast")
        self.decoder = Decoder(self.config, source, torch.float32, CPU, numerics)


class Differs(BaseException):
    """A difference. No `Exception`: the step loop would recover."""


class Twins:
    """Executors of both kinds. `seen` counts events."""

    def __init__(
        self,
        model: Any,
        *,
        drafter: Any,
        grammars: Any,
        gpu: Callable[..., GpuExecutor],
        **sizes: Any,
    ) -> None:
        self.cpu = TorchExecutor(model, drafter=drafter, grammars=grammars, **sizes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_steps, "device_for", lambda device: Captures(CPU))
            self.gpu = gpu(grammars=grammars, **sizes)
        self.seen: Counter[str] = Counter()
        self._expected: deque[tuple[StepPlan, StepResult | None]] = deque()

    def check(self, request: Request) -> None:
        self.cpu.check(request)
        self.gpu.check(request)

    def run(self, plan: StepPlan) -> StepResult:
        self.submit(plan)
        return self.wait()

    def submit(self, plan: StepPlan) -> None:
        drafts, chunks = plan.num_drafts, plan.query_lens - plan.num_drafts > 1
        new, seen = plan.deltas.new_sequences, self.seen
        seen["blocks zeroed"] += len(plan.deltas.zeroed_blocks)
        seen["resumed"] += sum(len(a.tokens) > a.num_prompt_tokens for a in new)
        seen["prefix hits"] += sum(a.kv_len_tokens > 0 for a in new)
        seen["plans in flight"] += bool(self._expected)
        seen["mixed steps"] += bool((drafts > 0).any() and chunks.any())
        seen["unfinished chunks"] += int((~plan.wants_logits).sum())
        seen["catch-ups"] += int((plan.catch_up > 0).sum())
        self._expected.append((plan, self._run_cpu(plan)))
        self.gpu.submit(plan)

    def _run_cpu(self, plan: StepPlan) -> StepResult | None:
        return self.cpu.run(plan)

    def wait(self) -> StepResult:
        plan, expected = self._expected.popleft()
        result, seen = self.gpu.wait(), self.seen
        if expected is not None:
            try:
                self._compare(plan, result, expected)
            except AssertionError as difference:
                raise Differs(str(difference)) from difference
        drafted, accepted = result.num_drafted, result.num_accepted
        seen["accepted"] += int(accepted.sum())
        seen["all accepted"] += int(((drafted > 1) & (accepted == drafted)).sum())
        seen["rejected"] += int((accepted < drafted).sum())
        seen["drafted fewer"] += int((drafted < plan.num_drafts).sum())
        seen["log probabilities"] += sum(len(entry.chosen) for entry in result.logprobs)
        for status in RowStatus:
            seen[status.name] += int((result.status == status).sum())
        return result

    def reset(self) -> None:
        self._expected.clear()
        self.cpu.reset()
        self.gpu.reset()

    def _compare(self, plan: StepPlan, actual: StepResult, expected: StepResult) -> None:
        for name in RESULTS:
            mine, reference = getattr(actual, name), getattr(expected, name)
            assert mine.dtype == reference.dtype, name
            assert mine.tolist() == reference.tolist(), (plan.step_id, name)
        assert actual.generations is plan.generations
        assert np.array_equal(actual.draft_kv_lens, expected.draft_kv_lens)
        assert actual.draft_s >= 0 and actual.target_s > 0
        for mine, reference in zip(actual.logprobs, expected.logprobs, strict=True):
            assert (mine.slot, mine.first_position) == (reference.slot, reference.first_position)
            np.testing.assert_allclose(mine.chosen, reference.chosen, rtol=1e-4, atol=1e-4)
            assert mine.top_ids.tolist() == reference.top_ids.tolist()
            np.testing.assert_allclose(mine.top, reference.top, rtol=1e-4, atol=1e-4)
        if not self._expected:  # the state of the slots, rejected drafts too
            tails = np.maximum(actual.num_drafted - np.diff(actual.row_splits), 0)
            for slot, tail in zip(plan.slots.tolist(), tails.tolist(), strict=True):
                self._compare_slot(slot, tail)

    def _compare_slot(self, slot: int, tail: int) -> None:
        table, state, drafter = self.cpu.table, self.gpu.state, self.cpu.drafter
        if table.failed[slot] == RowStatus.NO_TOKEN:  # only the host knows
            return
        stop = int(table.num_tokens[slot]) + tail
        assert int(state.num_tokens[slot]) == table.num_tokens[slot]
        assert state.tokens[slot, :stop].tolist() == table.tokens[slot, :stop].tolist()
        assert int(state.kv_len[slot]) == table.kv_len[slot]
        if drafter is not None:
            lens = drafter.kv_len[[slot]] if isinstance(drafter, DraftModel) else None
            lens = drafter.kv_lens(np.array([slot])) if lens is None else lens
            assert lens is None or int(state.draft_kv_len[slot]) == lens[0]


class LateTwins(Twins):
    """Twins whose drafts are a step late, so that only the final output equals the CPU's."""

    def _run_cpu(self, plan: StepPlan) -> None:
        return None


def run_twins(
    requests: Sequence[Request],
    target: Any,
    draft: Any = None,
    *,
    k: int = 0,
    lookups: LookupSettings | None = None,
    twins: type[Twins] = Twins,
    gpu: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[dict[str, list[int]], Counter[str]]:
    """Run `requests` to their ends; return outputs and counts of events. `settings` are those of
    `run_engine`, `gpu` those of the GPU executor alone."""
    sizes = {"num_blocks": 64, "block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    settings = sizes | settings
    drafter: Drafter | None = None if draft is None else drafter_of(draft.model)
    if lookups is not None:
        loaded = {name: LookupDrafter(each) for name, each in lookups.lookups.items()}
        drafter = ChainDrafter(model=drafter, lookups=loaded, default=lookups.default)
        settings["drafter"] = lookups.default
    executor = partial(
        GpuExecutor,
        target.decoder,
        max_sequence_tokens=min(
            target.config.max_position_tokens, settings["num_blocks"] * settings["block_size"]
        ),
        max_num_batched_tokens=settings["max_num_batched_tokens"],
        draft=None if draft is None else draft.decoder,
        max_drafts=k,
        lookups=lookups,
        **(gpu or {}),
    )
    run = run_engine(
        requests,
        target.model,
        None if draft is None else draft.model,
        lookahead=f"fixed:{k}" if k else "off",
        drafting=drafter,
        kind=partial(twins, gpu=executor),  # type: ignore[arg-type]
        **settings,
    )
    seen: Counter[str] = run.executor.seen
    seen["preemptions"] = run.scheduler.stats.preemptions
    return run.outputs, seen
