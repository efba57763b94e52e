"""The configuration and executor of the replays in these tests."""

from __future__ import annotations

from typing import Any

from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.speculation.config import LookaheadConfig
from sim.cost.base import CostModel
from sim.executor.acceptance import PositionAcceptance
from sim.executor.fake import FakeExecutor
from tests.checking.cost import LinearCost


def config_for(**overrides: Any) -> SchedulerConfig:
    settings: dict[str, Any] = {
        "num_blocks": 400,
        "block_size": 16,
        "max_num_seqs": 16,
        "max_model_len": 2000,
        "max_num_batched_tokens": 256,
    }
    return SchedulerConfig(**(settings | overrides))


def speculating(k: int) -> dict[str, Any]:
    lookahead = LookaheadConfig(policy="fixed", k=k)
    return {"lookahead": lookahead, "draft_context_tokens": 2000}


def executor_for(config: SchedulerConfig, cost: CostModel | None = None) -> FakeExecutor:
    acceptance = PositionAcceptance([0.6], max_num_seqs=config.max_num_seqs)
    return FakeExecutor(
        max_num_seqs=config.max_num_seqs, cost=cost or LinearCost(), acceptance=acceptance
    )
