"""Every accepted request ends in exactly one way, at any moment, without an effect on the others.
One that began elsewhere continues as if it had never stopped."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import FinishReason
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.plan import StepResult
from cbatch.core.scheduler.scheduler import Scheduler
from tests.checking.executor import Faults
from tests.checking.invariants import check_scheduler
from tests.checking.models import ModelledAcceptance
from tests.helpers import World, make_config, make_request

DEPTHS = pytest.mark.parametrize("depth", [0, 1])
ALWAYS = ModelledAcceptance(1.0)


def crowd():
    return [make_request(f"r{i}", 5 + 9 * i, seed=i, max_tokens=12) for i in range(4)]


@pytest.mark.parametrize("lookahead", ["off", "fixed:3"])
@pytest.mark.parametrize("max_tokens", [60, 62, 63, 65])
def test_a_row_ends_in_time_if_only_some_plans_overlap(lookahead, max_tokens):
    """The bound on how near the end is must count the tokens of overlapped plans too."""
    world = World(make_config(lookahead=lookahead), depth=1, acceptance=ALWAYS)
    world.add(make_request("a", max_tokens=max_tokens))
    scheduler, executor = world.scheduler, world.executor
    ended = []
    while scheduler.has_work:
        for _ in range(2):
            if (plan := scheduler.schedule(0.0)) is not None:
                executor.submit(plan)
        while scheduler.num_in_flight:
            ended += scheduler.update_from_output(executor.wait(), 0.0).finished
            check_scheduler(scheduler)
    assert [end.output.tolist() for end in ended] == [world.reference("a")[0]]


@DEPTHS
@pytest.mark.parametrize("keep_tokens", [0, 1, 3])
def test_the_text_side_cuts_the_output(depth, keep_tokens):
    world = World(make_config(lookahead="fixed:3"), depth=depth)
    world.add(*crowd())
    while len(world.shown["r1"]) < 4:
        world.step()
    assert world.scheduler.finish("r1", keep_tokens, world.clock())
    assert not world.scheduler.finish("r1", keep_tokens, world.clock())
    assert not world.scheduler.cancel("r1", world.clock())
    world.run()
    world.assert_reference("r0", "r2", "r3")
    assert world.finished["r1"].reason is FinishReason.STOP
    assert world.output("r1") == world.reference("r1")[0][:keep_tokens]


@DEPTHS
def test_fail_ends_one_request_with_its_message(depth):
    world = World(depth=depth)
    world.add(*crowd())
    for _ in range(3):
        world.step()
    assert world.scheduler.fail("r1", "the reason", world.clock())
    assert not world.scheduler.fail("r1", "again", world.clock())
    world.run()
    assert world.finished["r1"].reason is FinishReason.ERROR
    assert world.finished["r1"].message == "the reason"
    world.assert_reference("r0", "r2", "r3")


@DEPTHS
def test_a_request_id_is_free_again_once_its_request_has_ended(depth):
    world = World(depth=depth)
    world.add(make_request("a", max_tokens=3))
    with pytest.raises(FieldError, match="request_id"):
        world.add(make_request("a", max_tokens=3))
    world.run()
    world.scheduler.add(make_request("a", max_tokens=3), world.clock())
    finished = []
    while world.scheduler.has_work:
        commit = world.loop.step()
        finished += commit.finished if commit else ()
    assert [(end.request_id, len(end.output)) for end in finished] == [("a", 3)]


def test_blocks_of_a_row_that_was_cancelled_while_it_failed_are_zeroed():
    """Depth 1: when the client cancels, the step in flight turns out not to be finite."""
    config = make_config(num_blocks=8, max_num_seqs=2)
    world = World(config, depth=1, faults=Faults(non_finite_at={"a": 3}))
    world.add(make_request("a", 8, max_tokens=10))
    while len(world.shown["a"]) < 3:
        world.step()
    assert world.scheduler.cancel("a", world.clock())
    heirs = [make_request(f"b{i}", 10, max_tokens=8) for i in range(4)]
    world.add(*heirs)
    world.run()
    world.assert_reference(*(heir.request_id for heir in heirs))
    assert any(len(plan.deltas.zeroed_blocks) for plan in world.plans)


@pytest.mark.parametrize(("min_tokens", "kept"), [(0, 2), (1, 2), (2, 4), (3, 4)])
def test_commit_itself_cuts_at_a_stop_id_but_not_before_min_tokens(min_tokens, kept):
    """An executor bans stop ids before min_tokens; the core does not rely on it."""
    scheduler = Scheduler(make_config(lookahead="fixed:4", eos_ids=(7,)))
    scheduler.add(make_request("a", 6, max_tokens=9, min_tokens=min_tokens), 0.0)

    def emit(*tokens):
        plan = scheduler.schedule(0.0)
        return scheduler.update_from_output(
            StepResult(
                step_id=plan.step_id,
                generations=plan.generations,
                tokens=np.asarray(tokens, np.int32),
                row_splits=np.asarray([0, len(tokens)], np.int32),
                num_drafted=plan.num_drafts,
                num_accepted=np.asarray([len(tokens) - 1], np.int32),
                status=np.zeros(1, np.uint8),
            ),
            0.0,
        )

    assert not emit(5).finished
    (end,) = emit(7, 6, 7, 6, 6).finished
    assert end.output.tolist() == [5, 7, 6, 7, 6, 6][:kept]
    assert end.reason is FinishReason.STOP
    check_scheduler(scheduler)


def test_the_parameters_of_a_call_are_looked_through_once(monkeypatch):
    """Parameters may name as many ids as the vocabulary has, and a call has many choices."""
    checked = []
    check = SchedulerConfig.check_params
    monkeypatch.setattr(
        SchedulerConfig, "check_params", lambda *args: checked.append(args) or check(*args)
    )
    world = World(make_config())
    first = make_request("r0", max_tokens=2)
    world.add(*(structs.replace(first, request_id=f"r{i}", choice=i) for i in range(9)))
    world.add(make_request("other", max_tokens=2))
    assert len(checked) == 2
    bad = make_request("bad", banned_token_ids=(10**6,))
    for name in ("bad", "again"):
        with pytest.raises(FieldError, match="banned_token_ids"):
            world.add(structs.replace(bad, request_id=name))
    world.run()


# --- beginnings elsewhere -------------------------------------------------------------------------


def finish(request, known=(), **world_settings):
    """Return (output, tokens generated) of a request that starts with the tokens `known`."""
    world = World(**world_settings)
    world.scheduler.add(request, 0.0, tuple(known))
    ends = []
    while world.scheduler.has_work:
        commit = world.loop.step()
        check_scheduler(world.scheduler)
        ends += [end.output.tolist() for end in commit.finished]
    (output,) = ends
    return output, world.scheduler.stats.emitted_tokens


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("lookahead", ["off", "fixed:3"])
@pytest.mark.parametrize("known", [1, 19])
def test_the_rest_is_what_it_would_have_been(depth, lookahead, known):
    request = make_request("r", 9, seed=3, max_tokens=20, min_tokens=5)
    expected, _ = finish(request)
    resumed = finish(
        request, expected[:known], config=make_config(lookahead=lookahead), depth=depth
    )
    assert resumed == (expected, 20 - known), "only the rest is generated"


def test_a_resumed_request_goes_before_those_that_wait():
    world = World(make_config(max_num_seqs=1))
    world.add(make_request("waits", max_tokens=3))
    world.scheduler.add(make_request("begun", max_tokens=9), 0.0, (1, 2))
    world.loop.step()
    assert world.plans[0].deltas.new_sequences[0].request_id == "begun"


@pytest.mark.parametrize("output", [(1, 2, 3), (10**6,), (-1,)])
def test_a_transcript_that_cannot_be_is_refused(output):
    world = World()
    with pytest.raises(FieldError, match="output"):
        world.scheduler.add(make_request("r", max_tokens=3), 0.0, output)
    assert not world.scheduler.has_work
