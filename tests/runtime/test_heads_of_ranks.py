"""Heads with a model that ranks share: each rank drafts the same from the states of all.

The ranks are threads here, each with an engine of its own that makes the same plans.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from msgspec import structs

from cbatch.core.request.request import Request
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.cpu.drafters.eagle import EagleDrafter
from cbatch.runtime.cpu.drafters.kinds import HEADS, drafter_of
from cbatch.runtime.cpu.drafters.medusa import MedusaDrafter
from cbatch.runtime.cpu.executor import TorchExecutor
from cbatch.runtime.drafting.heads.head import Head
from cbatch.runtime.drafting.heads.loading import load_heads
from cbatch.runtime.model.checkpoint import Checkpoint
from cbatch.runtime.model.shapes import Numerics
from cbatch.runtime.model.sharding import ShardedWeights, shard_config
from cbatch.runtime.rank_group import RankGroup
from tests.runtime import made_heads
from tests.runtime.engines import Run, make_request, run_engine
from tests.runtime.marks import needs_compiler
from tests.runtime.pairs import NoisyWeights, tiny_config, tiny_model
from tests.runtime.test_eagle import eagle1, eagle3, prompts
from tests.runtime.test_ranks import by_ranks

pytestmark = needs_compiler


def medusa(folder: Path) -> tuple[Path, None]:
    made_heads.write_head(folder, made_heads.medusa_config(), made_heads.medusa_tensors())
    return folder, None


def share(ranks: RankGroup) -> Model:
    config = tiny_config()
    source = ShardedWeights(NoisyWeights(1), config, ranks.rank, ranks.size)
    numerics = Numerics(mode="invariant", may_pack=True)
    return Model(shard_config(config, ranks.size), source, torch.float32, numerics, ranks)


class Counting(TorchExecutor):
    accepted = rejected = 0

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        self.accepted += int(result.num_accepted.sum())
        self.rejected += int((result.num_accepted < result.num_drafted).sum())
        return result


class Served(NamedTuple):
    run: Run
    executor: Counting


def serve(
    ranks: RankGroup, requests: list[Request], head: Path | None, k: int, **settings: Any
) -> Served:
    target = share(ranks)
    draft: Head | None = None
    if head is not None:
        (draft, *_) = load_heads(head, target, "the target", HEADS)
    sizes = {"num_blocks": 256, "block_size": 4, "max_num_seqs": 8} | settings
    sizes = {name: sizes[name] for name in ("num_blocks", "block_size", "max_num_seqs")}
    drafter = None if draft is None else drafter_of(draft)
    executor = Counting(target, drafter=drafter, **sizes)
    lookahead = f"fixed:{k}" if k else "off"
    given: Any = {"executor": executor, "drafting": drafter, "lookahead": lookahead} | settings
    return Served(run_engine(requests, target, draft, **given), executor)  # type: ignore[arg-type]


@pytest.fixture
def whole_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide the target's files, from which heads read borrowed tensors."""
    monkeypatch.setattr(
        "cbatch.runtime.drafting.heads.loading.open_checkpoint",
        lambda path: Checkpoint(tiny_config(), NoisyWeights(1), torch.float32),
    )


@pytest.mark.usefixtures("whole_weights")
@pytest.mark.parametrize("make", [eagle3, eagle1, medusa])
def test_text_is_that_without_a_head(make: Callable[..., Any], tmp_path: Path) -> None:
    """Requests are greedy and seeded. They run with k = 4, preemptions and prefix hits, and with k
    = 0 while the head reads along."""
    head, _ = make(tmp_path)
    shared = prompts(1, seed=9, low=24, high=25)[0]
    requests = [
        make_request(
            f"r{i}",
            (shared if i % 2 else []) + prompt,
            max_tokens=24,
            **({"temperature": 0.8, "seed": i, "verification": "coupled"} if i % 3 == 2 else {}),
        )
        for i, prompt in enumerate(prompts(12))
    ]
    hard = {"num_blocks": 40, "max_num_batched_tokens": 40, "max_num_seqs": 6}
    plain = by_ranks(2, partial(serve, requests=requests, head=None, k=0))
    outputs = plain[0].run.outputs
    assert len({tuple(tokens) for tokens in outputs.values()}) == len(requests)
    idle = [structs.replace(r, params=structs.replace(r.params, max_lookahead=0)) for r in requests]
    for chosen, scarce in ((requests, hard), (idle, {})):
        results = by_ranks(2, partial(serve, requests=chosen, head=head, k=4, **scarce))
        drafters = [served.executor.drafter for served in results]
        assert all(isinstance(each, EagleDrafter | MedusaDrafter) for each in drafters)
        states = [each._states.of_slot for each in drafters]  # type: ignore[union-attr]
        assert torch.equal(*states) and bool(states[0].any())
        for served in results:
            assert served.run.outputs == outputs
            accepted, rejected = served.executor.accepted, served.executor.rejected
            assert (accepted > 0, rejected > 0) == (chosen is requests, chosen is requests)
        stats = results[0].run.scheduler.stats
        assert chosen is idle or (stats.preemptions > 0 and stats.prefix_hit_tokens > 0)


@pytest.mark.usefixtures("whole_weights")
@pytest.mark.parametrize("make", [eagle3, medusa])
def test_drafts_are_those_with_a_whole_model(make: Callable[..., Any], tmp_path: Path) -> None:
    """A few drafts may differ: states of ranks are rounded at other places."""
    head, _ = make(tmp_path)
    requests = [make_request(f"r{i}", p, max_tokens=24) for i, p in enumerate(prompts(8))]
    (mine, _) = by_ranks(2, partial(serve, requests=requests, head=head, k=3))
    target = tiny_model()
    draft = load_heads(head, target, "the target", HEADS)[0]
    drafter = drafter_of(draft)
    executor = Counting(target, drafter=drafter, num_blocks=256, block_size=4, max_num_seqs=8)
    given: Any = {"executor": executor, "drafting": drafter, "lookahead": "fixed:3"}
    whole = run_engine(requests, target, draft, **given)  # type: ignore[arg-type]
    assert mine.run.outputs == whole.outputs
    assert mine.executor.accepted > 0
    assert np.isclose(mine.executor.accepted, executor.accepted, rtol=0.1)
