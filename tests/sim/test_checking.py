"""The checking executor catches every kind of broken plan."""

from __future__ import annotations

import numpy as np
import pytest

from cbatch.core.request.request import SamplingParams
from cbatch.core.scheduler.plan import Deltas, NewSequence, RowStatus, StepPlan
from tests.checking.executor import Faults, SimExecutor
from tests.checking.kv import ContractBreachError
from tests.checking.language import reference_output
from tests.checking.models import ScriptedAcceptance
from tests.helpers import make_request

NONE = np.zeros(0, np.int32)
NO_DELTAS = Deltas(False, NONE, NONE, (), NONE, NONE, NONE)


def ints(*values):
    return np.asarray(values, np.int32)


def executor(**settings):
    base = {"num_blocks": 8, "block_size": 4, "max_num_seqs": 2, "vocab_size": 100}
    return SimExecutor(**(base | settings))


def admit(name="a", slot=0, generation=0, prompt=(1, 2, 3, 4, 5), blocks=(0, 1, 2), **settings):
    base = {
        "seed": 0,
        "choice": 0,
        "params": SamplingParams(max_tokens=16),
        "stop_ids": (),
        "tokens": ints(*prompt),
        "num_prompt_tokens": 5,
        "max_total_tokens": 12,
        "kv_len_tokens": 0,
        "draft_kv_len_tokens": 0,
    }
    return NewSequence(
        slot=slot, generation=generation, request_id=name, blocks=ints(*blocks), **(base | settings)
    )


def deltas(*admitted, reset=False, released=(), zeroed=(), appended=()):
    columns = [ints(*column) for column in zip(*appended, strict=True)] or [NONE] * 3
    return Deltas(reset, ints(*released), ints(*zeroed), admitted, *columns)


def plan(*rows, changes=NO_DELTAS, step_id=0):
    """Make a plan; each row is (slot, generation, query_len, num_drafts, catch_up,
    wants_logits)."""
    columns = [ints(*column) for column in zip(*rows, strict=True)]
    return StepPlan(step_id, *columns[:5], columns[5].astype(bool), changes)


PREFILL = (0, 0, 5, 0, 0, 1)


def prefilled(**settings):
    """Return an executor with `a` in slot 0: five prompt tokens in KV and one emitted."""
    fake = executor(**settings)
    result = fake.run(plan(PREFILL, changes=deltas(admit())))
    return fake, result


def test_prefill_then_verification_gives_the_reference():
    fake, first = prefilled(acceptance=ScriptedAcceptance({"a": [1, 2]}))
    second = fake.run(plan((0, 0, 3, 2, 5, 1)))
    assert (second.num_drafted.tolist(), second.num_accepted.tolist()) == ([2], [1])
    third = fake.run(plan((0, 0, 3, 2, 0, 1)))
    assert third.num_accepted.tolist() == [2]
    tokens = np.concatenate([first.tokens, second.tokens, third.tokens]).tolist()
    request = make_request("a", [1, 2, 3, 4, 5])
    expected, _ = reference_output(request, vocab_size=100, eos_ids=(), max_model_len=11)
    assert tokens == expected
    assert fake.stats.num_rejections == fake.stats.num_full_acceptances == 1
    # After a full acceptance the draft lags by one token.
    with pytest.raises(ContractBreachError, match="the draft lags 1"):
        fake.run(plan((0, 0, 2, 1, 0, 1)))


def test_drafts_are_clipped_while_overlapped_and_refused_otherwise():
    fake = executor(acceptance=ScriptedAcceptance({"a": [4]}))
    fake.submit(plan(PREFILL, changes=deltas(admit(max_total_tokens=8))))
    fake.submit(plan((0, 0, 5, 4, 5, 1)))
    fake.wait()
    fake.submit(plan((0, 0, 3, 2, 1, 1)))  # the row has all its tokens already
    assert fake.wait().num_drafted.tolist() == [1]
    result = fake.wait()
    assert (len(result.tokens), result.num_drafted.tolist()) == (0, [0])
    alone, _ = prefilled()
    with pytest.raises(ContractBreachError, match="pass the end"):
        alone.run(plan((0, 0, 8, 7, 5, 1)))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (plan((0, 1, 1, 0, 0, 1)), "stale generation"),
        (plan((1, 0, 1, 0, 0, 1)), "slot 1 is empty"),
        (plan((0, 0, 2, 0, 0, 1)), "query of 2 with 0 drafts, 1 tokens"),
        (plan((0, 0, 1, 0, 0, 0)), "query of 1 with 0 drafts"),
        (plan((0, 0, 2, 1, 4, 1)), "catch-up 4, the draft lags 5"),
        (plan((0, 0, 1, 0, 0, 1), (0, 0, 1, 0, 0, 1)), "two rows"),
        (plan((0, 0, 1, 0, 0, 1), changes=deltas(admit())), "while occupied"),
        (plan((0, 0, 1, 0, 0, 1), changes=deltas(admit(), released=[0])), "generation 0 after 0"),
        (plan((0, 0, 1, 0, 0, 1), changes=deltas(released=[1])), "released twice"),
        (plan((0, 0, 1, 0, 0, 1), changes=deltas(appended=[(0, 4, 4)])), "leaves a gap"),
        (plan((0, 0, 1, 0, 0, 1), changes=deltas(appended=[(0, 3, 8)])), "does not exist"),
        (plan((0, 0, 1, 0, 0, 1), changes=deltas(zeroed=[0])), "was never written"),
        (
            plan((0, 0, 1, 0, 0, 1), changes=deltas(appended=[(0, 0, 7)])),
            "position 0 .block 7. was never written",
        ),
        (
            plan((1, 0, 1, 0, 0, 1), changes=deltas(admit("b", 1, blocks=[3], kv_len_tokens=4))),
            "was never written",
        ),
        (
            plan(
                (1, 0, 1, 0, 0, 1),
                changes=deltas(admit("b", 1, prompt=(1, 9, 3, 4, 5), kv_len_tokens=4)),
            ),
            "position 1 .block 0. was written by another prefix",
        ),
        (
            plan(
                (1, 0, 1, 0, 0, 1),
                changes=deltas(admit("b", 1, kv_len_tokens=4, draft_kv_len_tokens=4)),
            ),
            "draft KV position 0",
        ),
    ],
)
def test_a_broken_plan_raises(broken, message):
    fake, _ = prefilled()
    with pytest.raises(ContractBreachError, match=message):
        fake.run(broken)


def test_a_block_given_to_two_sequences_raises_in_the_same_step():
    fake, _ = prefilled()
    other = admit("b", 1, prompt=(9, 8, 7, 6, 5), blocks=(3, 1))
    with pytest.raises(ContractBreachError, match="another prefix"):
        fake.run(plan((0, 0, 1, 0, 0, 1), (1, 0, 5, 0, 0, 1), changes=deltas(other)))


def test_non_finite_row_emits_nothing_and_its_blocks_must_be_zeroed():
    fake = executor(faults=Faults(non_finite_at={"a": 1}))
    fake.run(plan(PREFILL, changes=deltas(admit())))
    result = fake.run(plan((0, 0, 1, 0, 0, 1)))
    assert result.status.tolist() == [RowStatus.NON_FINITE] and len(result.tokens) == 0
    heir = admit("b", 0, generation=1, prompt=(9, 8, 7, 6, 5))
    row = (0, 1, 5, 0, 0, 1)
    with pytest.raises(ContractBreachError, match="non-finite"):
        fake.run(plan(row, changes=deltas(heir, released=[0])))
    clean = admit("b", 0, generation=2, prompt=(9, 8, 7, 6, 5))
    zeroed = deltas(clean, released=[0], zeroed=[0, 1, 2])
    assert len(fake.run(plan((0, 2, 5, 0, 0, 1), changes=zeroed)).tokens) == 1
