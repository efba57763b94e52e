"""Small engines over real executors: tiny models without a checkpoint, requests by hand, and a
whole engine that records the logit bits which decided each token.

An engine without a model is in `tests/toy_engine.py` (with text) and `tests/helpers.py` (by
steps)."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor

from cbatch.core.request.request import FinishReason, Request, SamplingParams
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.plan import NewSequence, StepPlan, StepResult
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.engine.loop import StepLoop, ThreadedExecutor
from cbatch.runtime.cpu import executor as executor_module
from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.cpu.drafters.draft_model import DraftModel
from cbatch.runtime.cpu.executor import TorchExecutor
from cbatch.runtime.cpu.verify import RowsToVerify, Verified, verify
from cbatch.runtime.drafting.contract import Drafter
from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.config_json import parse_config
from cbatch.runtime.model.weight_files import WeightSource
from cbatch.runtime.sampling.structured import GrammarSource
from tests.checking.invariants import check_scheduler

LogitBits = dict[tuple[str, int], bytes]
VOCAB = 64


def tiny_config(vocab_size: int = VOCAB, context: int = 256, **fields: Any) -> ModelConfig:
    values = {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
    }
    return parse_config(values | fields, Path("config.json"))


class NoisyWeights(WeightSource):
    """Random weights of order 1 / sqrt(fan-in), each moved by `noise` of its own size.

    A row of embedding or head depends on its token alone, so models of different vocabulary sizes
    agree on the tokens they share. The embedding of the token `poison` is NaN.
    """

    def __init__(self, seed: int, noise: float = 0.0, poison: int | None = None) -> None:
        self.seed, self.noise, self.poison = seed, noise, poison

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        scale = 2.0 if "lm_head" in name else shape[-1] ** 0.5 * 1.5
        generator = torch.Generator().manual_seed(self.seed + zlib.crc32(name.encode()))
        weight = self._normal(shape, generator)
        if self.noise:
            generator.manual_seed(self.seed + 1 + zlib.crc32(name.encode()))
            weight = weight + self.noise * self._normal(shape, generator)
        if self.poison is not None and "embed" in name:
            weight[self.poison] = torch.nan
        return weight * (scale / shape[-1] if "lm_head" not in name else scale / shape[-1] ** 0.5)

    @staticmethod
    def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        rows = [torch.randn(shape[1:], generator=generator) for _ in range(shape[0])]
        return torch.stack(rows)


def tiny_model(
    *,
    seed: int = 1,
    noise: float = 0.0,
    dtype: torch.dtype = torch.float32,
    vocab_size: int = VOCAB,
    context: int = 256,
    poison: int | None = None,
) -> Model:
    config = tiny_config(vocab_size, context)
    source = NoisyWeights(seed, noise, poison)
    return Model(config, source, dtype, "invariant")


# --- engines -------------------------------------------------------------------------------------


class RecordingExecutor(TorchExecutor):
    """An executor that also records the logits that decided each (request, position), and drafts
    per step."""

    def __init__(self, model: Model, **settings: Any) -> None:
        super().__init__(model, **settings)
        self.bits: LogitBits = {}
        self.owner: dict[int, str] = {}
        self.drafted: list[np.ndarray] = []  # of the rows that decoded, by step
        self.accepted: list[np.ndarray] = []
        self.chunk_steps: list[tuple[int, int]] = []  # rows without and with logits, by step
        self.chunk_tokens: list[int] = []  # of each row without logits, over all steps
        self.row_of_request: dict[str, list[tuple[int, int, int]]] = {}  # slot, drafted, accepted

    def run(self, plan: StepPlan) -> StepResult:
        for a in plan.deltas.new_sequences:
            self.owner[a.slot] = a.request_id
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(executor_module, "verify", self._verify)
            result = super().run(plan)
        self.drafted.append(result.num_drafted[plan.wants_logits])
        self.accepted.append(result.num_accepted[plan.wants_logits])
        wanting = int(plan.wants_logits.sum())
        self.chunk_steps.append((plan.num_rows - wanting, wanting))
        self.chunk_tokens += plan.query_lens[~plan.wants_logits].tolist()
        for i, slot in enumerate(plan.slots.tolist()):
            row = (slot, int(result.num_drafted[i]), int(result.num_accepted[i]))
            self.row_of_request.setdefault(self.owner[slot], []).append(row)
        return result

    def _verify(self, logits: Tensor, rows: RowsToVerify, table: Any) -> Verified:
        raw = logits.clone().numpy()
        verdict = verify(logits, rows, table)
        start = 0
        for i, slot in enumerate(rows.slots.tolist()):
            for depth in range(int(verdict.num_accepted[i]) + 1):
                key = (self.owner[slot], int(rows.known[i]) + depth)
                bits = raw[start + depth].tobytes()
                assert self.bits.setdefault(key, bits) == bits, f"{key} was decided twice"
            start += int(rows.num_drafted[i]) + 1
        return verdict


class PricedExecutor(RecordingExecutor):
    """An executor that reports the durations of a made-up machine, so that decisions of `adaptive`
    are reproducible."""

    def run(self, plan: StepPlan) -> StepResult:
        return made_up_durations(plan, super().run(plan))


def made_up_durations(plan: StepPlan, result: StepResult) -> StepResult:
    depth = int(result.num_drafted.max(initial=0))
    target_s = 5e-3 + 1e-4 * int(plan.query_lens.sum())
    return structs.replace(result, draft_s=3e-4 * depth, target_s=target_s)


class Run:
    """Outputs, reasons and statistics of a finished engine."""

    def __init__(self, scheduler: Scheduler, executor: RecordingExecutor) -> None:
        self.scheduler, self.executor = scheduler, executor
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.messages: dict[str, str | None] = {}

    @property
    def drafted(self) -> np.ndarray:
        return np.concatenate(self.executor.drafted)

    @property
    def accepted(self) -> np.ndarray:
        return np.concatenate(self.executor.accepted)

    @property
    def acceptance(self) -> float:
        """Accepted over observed trials: the ratio of sums that does not depend on k."""
        rejected = (self.accepted < self.drafted).sum()
        return float(self.accepted.sum() / (self.accepted.sum() + rejected))

    def acceptance_of(self, request_id: str) -> float:
        rows = np.array(self.executor.row_of_request[request_id])
        hits = rows[:, 2].sum()
        return float(hits / (hits + (rows[:, 2] < rows[:, 1]).sum()))


def parse_lookahead(text: str) -> LookaheadConfig:
    policy, _, k = text.partition(":")
    return LookaheadConfig(policy=policy, k=int(k or 4))


def run_engine(
    requests: Sequence[Request],
    target: Model,
    draft: Model | None = None,
    *,
    lookahead: str = "off",
    depth: int = 0,
    num_blocks: int = 256,
    block_size: int = 4,
    max_num_seqs: int = 8,
    arrivals: Sequence[int] | None = None,
    drafting: Drafter | None = None,
    grammars: GrammarSource | None = None,
    kind: type[RecordingExecutor] | None = None,
    executor: Any = None,
    num_faults: int = 0,
    cancels: Mapping[str, int] = MappingProxyType({}),
    check: bool = True,
    clock: Callable[[], float] = time.monotonic,
    **settings: Any,
) -> Run:
    """Run `requests` to their ends; request i enters before step `arrivals[i]` (default: 0), and
    those of `cancels` are cancelled before the given step.

    The drafter is `drafting`, or one made from `draft`. `kind` is the executor's class
    unless `executor` is given. An executor that does not overlap steps itself runs in a thread.
    """
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=target.config.max_position_tokens,
        vocab_size=target.config.vocab_size,
        draft_context_tokens=None if draft is None else draft.config.max_position_tokens,
        draft_lags=getattr(draft, "lags", True),
        lookahead=parse_lookahead(lookahead),
        **(
            {"max_num_batched_tokens": 256, "decode_reserve_tokens": 4, "prompt_share": 1.0}
            | settings
        ),
    )
    scheduler = Scheduler(config)
    if executor is None:
        if kind is None:
            # Real durations would make the decisions of `adaptive` differ between runs.
            kind = PricedExecutor if config.lookahead.policy == "adaptive" else RecordingExecutor
        if drafting is None and draft is not None:
            drafting = DraftModel(draft)
        sizes = {"block_size": block_size, "max_num_seqs": max_num_seqs}
        if config.num_state_pages:
            sizes |= {"num_state_pages": config.num_state_pages, "max_drafts": config.lookahead.k}
        executor = kind(target, drafter=drafting, grammars=grammars, num_blocks=num_blocks, **sizes)
    threaded = ThreadedExecutor(executor)
    overlapped = executor if hasattr(executor, "submit") else threaded
    loop = StepLoop(scheduler, overlapped if depth else executor, clock=clock, depth=depth)
    run, step = Run(scheduler, executor), 0
    due = sorted(zip(arrivals or [0] * len(requests), requests, strict=True), key=lambda x: x[0])
    while due or scheduler.has_work:
        while due and due[0][0] <= step:
            scheduler.add(due.pop(0)[1], clock())
        for name in [name for name, end in cancels.items() if end == step]:
            assert scheduler.cancel(name, clock())
        commit = loop.step()
        if check:
            check_scheduler(scheduler)
        step += 1
        for end in commit.finished if commit is not None else ():
            run.outputs[end.request_id] = end.output.tolist()
            run.reasons[end.request_id] = end.reason
            run.messages[end.request_id] = end.message
    threaded.close()
    # The loop recovers from any exception, including unexpected ones.
    assert scheduler.stats.executor_resets == num_faults
    return run


def make_request(name: str, prompt: Sequence[int], **params: Any) -> Request:
    seed = params.pop("seed", 7)
    choice = params.pop("choice", 0)
    settings = {"max_tokens": 32, "temperature": 0.0, "ignore_eos": True} | params
    return Request(
        request_id=name,
        prompt=tuple(prompt),
        params=SamplingParams(**settings),
        seed=seed,
        choice=choice,
    )


def admission(
    slot: int,
    tokens: Sequence[int],
    *,
    max_total: int = 64,
    blocks: Sequence[int] = (),
    num_prompt_tokens: int | None = None,
    stop_ids: tuple[int, ...] = (),
    **params: Any,
) -> NewSequence:
    """Return a sequence that enters a slot with an empty KV cache."""
    return NewSequence(
        slot=slot,
        generation=1,
        request_id=f"r{slot}",
        seed=5,
        choice=0,
        params=SamplingParams(**params),
        stop_ids=stop_ids,
        tokens=np.array(tokens, dtype=np.int32),
        num_prompt_tokens=len(tokens) if num_prompt_tokens is None else num_prompt_tokens,
        max_total_tokens=max_total,
        kv_len_tokens=0,
        draft_kv_len_tokens=0,
        blocks=np.array(blocks, dtype=np.int32),
    )
