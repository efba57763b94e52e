"""`python -m tests.gpu_proofs.host_time`: processor time of the host in steps of the GPU path, for
`bench.gpu --section host`. Tensors have no values and launches do nothing; drafts are accepted at
random. A line of JSON is printed per row. Times are of the fastest of many windows, because other
programs slow this one."""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from time import thread_time
from typing import Any

import numpy as np
from msgspec import structs

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.request.request import SamplingParams
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.speculation.build import parse_lookahead
from cbatch.engine.core import EngineCore
from cbatch.engine.engine import Engine
from cbatch.runtime.gpu.executor import GpuExecutor
from tests.gpu_proofs.meta import Size, Start, model
from tests.triton_kernels.driver import TARGETS, recording
from triton_kernels.slots import advance as fields

# The demo pair.
DEMO = Size(
    "demo",
    model("llama", 4096, (8, 4, 32), num_hidden_layers=12, tie_word_embeddings=True),
    model("llama", 4096, (4, 2, 32), num_hidden_layers=1, tie_word_embeddings=True),
    slots=32,
    page_tokens=64,
    drafts=8,
    budget_tokens=1024,
)
ROWS = 28
PRICES = CostProfile(base_s=4e-4, token_s=1.2e-6, draft_pass_s=6e-5, verify_s=4e-5)
_CHANCE = 0.6  # of a draft to be accepted
_WINDOWS, _STEPS, _CHURN_STEPS = 16, 25, 128  # windows and their steps


class Device:
    """An executor that lets the GPU executor do its host work, and writes the device's results. Its
    clock advances by what a step would take. `spent_s` is the processor time by part."""

    def __init__(self, executor: GpuExecutor) -> None:
        self._executor, self.check = executor, executor.check
        self._plans: deque[StepPlan] = deque()
        self._random = np.random.default_rng(0)
        self.now_s = 0.0
        self.spent_s: Counter[str] = Counter()

    @property
    def num_pending(self) -> int:
        return len(self._plans)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            began_s = thread_time()
            result = function(*given)
            self.spent_s[part] += thread_time() - began_s
            return result

        return call

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        self.timed("submit", self._executor.submit)(plan)

    def wait(self) -> StepResult:
        self.timed("made up", self._answer)(self._plans.popleft())
        result = self.timed("wait", self._executor.wait)()
        return self.timed("made up", self._with_times)(result)

    def reset(self) -> None:
        raise AssertionError("a step failed")

    def _with_times(self, result: StepResult) -> StepResult:
        draft_s, target_s = self._price
        return structs.replace(result, draft_s=draft_s, target_s=target_s)

    def _answer(self, plan: StepPlan) -> None:
        """Write the device's result of the oldest pending step."""
        drafts = plan.num_drafts
        depth = int(drafts.max(initial=0))
        hits = (self._random.random((len(drafts), depth)) < _CHANCE).cumprod(axis=1).sum(axis=1)
        accepted = np.minimum(hits, drafts)
        rows = self._executor.pending[0].buffers.rows
        tokens = self._random.integers(300, 4000, (len(drafts), rows.shape[1] - fields.NUM_FIELDS))
        rows[plan.slots, fields.NUM_FIELDS :] = tokens
        rows[plan.slots, fields.STATUS] = 0
        rows[plan.slots, fields.DRAFTED], rows[plan.slots, fields.ACCEPTED] = drafts, accepted
        rows[plan.slots, fields.EMITTED] = np.where(plan.wants_logits, accepted + 1, 0)
        tokens_s = PRICES.token_s * int(plan.query_lens.sum())
        self._price = PRICES.draft_pass_s * (depth + 1) * (depth > 0), PRICES.base_s + tokens_s
        self.now_s += sum(self._price)


def engine_of(start: Start, lookahead: str) -> tuple[Engine, Device]:
    size, device = start.size, Device(start.executor)
    start.executor.reset()
    config = SchedulerConfig(
        num_blocks=4096,
        block_size=size.page_tokens,
        max_num_seqs=size.slots,
        max_model_len=2047,
        max_num_batched_tokens=size.budget_tokens,
        vocab_size=size.target.vocab_size,
        eos_ids=(0,),
        enable_prefix_caching=True,
        draft_context_tokens=4096,
        lookahead=parse_lookahead(lookahead),
        cost_profile=PRICES if lookahead == "adaptive" else None,
    )
    scheduler: Any = Scheduler(config)
    scheduler.schedule = device.timed("plan", scheduler.schedule)
    scheduler.update_from_output = device.timed("commit", scheduler.update_from_output)
    core = EngineCore(scheduler, device, clock=lambda: device.now_s, depth=1, drafters=("model",))
    return Engine(core, seed=0), device


def measured(
    start: Start, lookahead: str, *, churn: bool = False, windows: int = _WINDOWS
) -> dict[str, Any]:
    """Return microseconds of a step by part. `churn`: requests end after 64 tokens, and others
    enter; else every request stays."""
    engine, device = engine_of(start, lookahead)
    random, launches = np.random.default_rng(0), start.device
    params = SamplingParams(max_tokens=64 if churn else 1900, ignore_eos=True, temperature=0.0)

    def add(count: int) -> None:
        for _ in range(count):
            length = int(random.integers(28, 154)) if churn else 40
            engine.add(random.integers(300, 4000, length).tolist(), params)

    def window(steps: int) -> dict[str, float]:
        device.spent_s.clear()
        replayed, missed = launches.replayed.total(), len(launches.missed)
        tokens = engine.stats.output_tokens
        began_s = thread_time()
        for _ in range(steps):
            ended = sum(output.finished is not None for output in engine.step())
            if ended:
                device.timed("made up", add)(ended)
        spent_s = thread_time() - began_s - device.spent_s.pop("made up")
        tokens = engine.stats.output_tokens - tokens
        return {
            **{f"{part}_us": 1e6 * each / steps for part, each in device.spent_s.items()},
            "host_us": 1e6 * spent_s / steps,
            "tokens": tokens / steps,
            "us_per_token": 1e6 * spent_s / max(tokens, 1),
            "graphs": (launches.replayed.total() - replayed) / steps,
            "uncaptured": (len(launches.missed) - missed) / steps,
        }

    add(4 * start.size.slots if churn else ROWS)
    window(2 * _STEPS)  # for prompts and caches
    rows = [window(_CHURN_STEPS if churn else _STEPS) for _ in range(windows)]
    return min(rows, key=lambda row: row["us_per_token" if churn else "host_us"])


def rows() -> Iterator[dict[str, Any]]:
    with recording(TARGETS["sm_90"]) as launches:
        start = Start(DEMO, "sm_90", launches)
        start.capture()
        gc.collect()
        gc.freeze()
        for churn in (False, True):
            for lookahead in ("off", "fixed:4" if churn else "fixed:3", "adaptive"):
                labels = {"lookahead": lookahead, "requests": "churn" if churn else "stay"}
                yield labels | measured(start, lookahead, churn=churn)


if __name__ == "__main__":
    for row in rows():
        json.dump(row, sys.stdout)
        print(flush=True)
