"""Steps of every kind, planned by the scheduler, with made-up results."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest

from cbatch.core.request.request import Request, StructuredOutputs
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.engine.loop import StepLoop
from cbatch.runtime.drafting.lookups import NgramLookup
from cbatch.runtime.gpu import device_steps
from cbatch.runtime.gpu.capture import GROUPS
from cbatch.runtime.gpu.executor import GpuExecutor
from cbatch.runtime.gpu.host_drafts import LookupSettings
from cbatch.runtime.gpu.memory import kv_dtype_of
from tests.gpu_proofs.driver import Launches
from tests.gpu_proofs.meta import MetaDevice, OnlyQueued, Refused
from tests.gpu_proofs.sizes import Size, decoder, device_of, draft_of
from tests.runtime.engines import make_request, parse_lookahead

_MODEL_TOKENS = 2047

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 0.8, "verification": "coupled"},
    "rejection": {"temperature": 0.8, "verification": "rejection"},
    "looked up": {"drafter": ("ngram",)},
    "filtered": {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "log probabilities": {"logprobs": 2, "prompt_logprobs": 1},
    "shaped": {"frequency_penalty": 0.4, "logit_bias": {7: 3.0}},
    "shaped and sampled": {"temperature": 0.9, "presence_penalty": 0.5},
    "shaped and filtered": {"temperature": 0.9, "presence_penalty": 0.5, "top_k": 40},
    "structured": {"structured_outputs": StructuredOutputs(regex="a+")},
}


class AnyText:
    """A grammar that allows every text, and its source."""

    eos_ids = (1,)

    def __init__(self, vocab: int) -> None:
        self._bits = b"\xff" * -(-vocab // 8)

    def matcher(self, outputs: StructuredOutputs) -> AnyText:
        return self

    def plain_token(self, text: bytes) -> int | None:
        return None

    def forbid_repeats(self, outputs: StructuredOutputs) -> None:
        return None

    def compute_bitmask(self) -> bytes:
        return self._bits

    def try_consume_tokens(self, tokens: list[int]) -> int:
        return len(tokens)

    validate_tokens = try_consume_tokens

    def rollback(self, num_tokens: int) -> bool:
        return True

    def is_accepting(self) -> bool:
        return True

    def is_error(self) -> bool:
        return False


def requests(kind: str, count: int, size: Size) -> list[Request]:
    lengths, vocab = (3, 1, 17, 200, 33, 16, 620, 5), (size.draft or size.target).vocab_size
    period = vocab
    # So that lookups find something in the first one, too.
    if kind == "looked up" or size.draft is None:
        lengths, period = lengths[2:] + lengths[:2], 3
    return [
        make_request(
            f"{kind} {i}",
            [(31 * i + j % period) % vocab for j in range(n)],
            max_tokens=12,
            **KINDS[kind],
        )
        for i, n in zip(range(count), itertools.cycle(lengths), strict=False)
    ]


class FakedResults:
    """An executor that submits to a GPU executor, and makes up the results: half of the drafts are
    accepted."""

    def __init__(self, executor: GpuExecutor) -> None:
        self._executor, self.check = executor, executor.check
        self.masked = 0  # steps

    def run(self, plan: StepPlan) -> StepResult:
        try:
            self._executor.run(plan)
        except Exception as error:
            raise Refused(str(error)) from error
        self.masked += len(self._executor.host_side.masked(plan)) > 0
        accepted = plan.num_drafts // 2
        emitted = np.where(plan.wants_logits, accepted + 1, 0)
        row_splits = np.concatenate([[0], emitted.cumsum()]).astype(np.int32)
        return StepResult(
            step_id=plan.step_id,
            generations=plan.generations,
            tokens=np.full(row_splits[-1], 7, dtype=np.int32),
            row_splits=row_splits,
            num_drafted=plan.num_drafts,
            num_accepted=accepted.astype(np.int32),
            status=np.zeros(plan.num_rows, dtype=np.uint8),
        )

    def reset(self) -> None:
        raise Refused("a step failed")


class Run:
    """An executor of a size on a device without values, of the kind `arch`."""

    def __init__(self, size: Size, arch: str, launches: Launches) -> None:
        self.size, self.launches, self.device = size, launches, MetaDevice()
        self.queued = OnlyQueued(self.device)
        self.steps = self.masked = 0
        # The drafters of requests that name none.
        self.chain = ("ngram",) if size.draft is None else ("model",)
        target = decoder(size.target, size)
        draft = draft_of(size, target)
        launches.phase = "made"
        with pytest.MonkeyPatch.context() as patch, device_of(arch):
            patch.setattr(device_steps, "device_for", lambda device: self.device)
            self.executor = GpuExecutor(
                target,
                num_blocks=size.blocks,
                block_size=size.page_tokens,
                max_num_seqs=size.slots,
                max_sequence_tokens=_MODEL_TOKENS + 1,
                max_num_batched_tokens=size.budget_tokens,
                draft=draft,
                max_drafts=size.drafts,
                lookups=LookupSettings({"ngram": NgramLookup()}, self.chain),
                grammars=AnyText(size.target.vocab_size),
                kv_dtype=kv_dtype_of(target, size.kv_cache_dtype),
            )

    def capture(self, now: frozenset[str] = frozenset(GROUPS)) -> None:
        """Do what the executor does before it serves; kernels of groups other than `now` are
        late."""
        self.launches.phase = "captured"
        with self.queued:
            self.executor.capture(now)

    def serve(self, *kinds: str, count: int | None = None, steps: int = 14) -> None:
        """Serve `count` requests of each kind for `steps` steps; by default twice as many as there
        are slots."""
        self.launches.phase = " and ".join(kinds)
        size = self.size
        scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=size.blocks,
                block_size=size.page_tokens,
                max_num_seqs=size.slots,
                max_model_len=_MODEL_TOKENS,
                max_num_batched_tokens=size.budget_tokens,
                vocab_size=size.target.vocab_size,
                draft_context_tokens=_MODEL_TOKENS if size.draft and size.drafts else None,
                lookahead=parse_lookahead(f"fixed:{size.drafts}" if size.drafts else "off"),
                drafter=self.chain if size.drafts else None,
            )
        )
        executor = FakedResults(self.executor)
        loop = StepLoop(scheduler, executor, clock=time.monotonic)
        self.executor.reset()
        # Kinds take turns, so that steps have rows of all of them.
        count = count or 2 * size.slots
        for turn in zip(*(requests(kind, count, size) for kind in kinds), strict=True):
            for request in turn:
                scheduler.add(request, time.monotonic())
        with self.queued:
            for _ in range(steps):
                self.steps += loop.step() is not None
        self.masked += executor.masked


def late(launches: Launches) -> list[str]:
    """Return what would be compiled while requests wait, and in which phase."""
    met = ((phase, each) for phase, each in launches.specialisations.values())
    ahead = ("made", "captured")
    return [f"{each.name}: first met in {phase}" for phase, each in met if phase not in ahead]
