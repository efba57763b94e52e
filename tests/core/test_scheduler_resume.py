"""A request that began elsewhere continues from its tokens as if it had never stopped."""

from __future__ import annotations

import pytest

from cbatch.core.request.errors import FieldError
from cbatch.steplog.step_log import replay
from tests.checking.invariants import check_scheduler
from tests.helpers import World, make_config, make_request


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


def test_another_prefix_gives_another_rest():
    request = make_request("r", 9, seed=3, max_tokens=12)
    expected, _ = finish(request)
    wrong, _ = finish(request, [expected[0] ^ 1, *expected[1:5]])
    assert wrong[5:] != expected[5:], "a wrong transcript would be seen"


def test_a_resumed_request_goes_before_those_that_wait():
    world = World(make_config(max_num_seqs=1))
    world.add(make_request("waits", max_tokens=3))
    world.scheduler.add(make_request("begun", max_tokens=9), 0.0, (1, 2))
    world.loop.step()
    assert world.plans[0].deltas.new_sequences[0].request_id == "begun"


def test_a_replay_resumes_too():
    world = World()
    world.scheduler.add(make_request("r", max_tokens=9), 0.0, (1, 2))
    world.loop.step()
    plans = []
    replay(world.events, on_plan=plans.append)
    assert plans[0].deltas.new_sequences[0].tokens.tolist()[-2:] == [1, 2]


@pytest.mark.parametrize("output", [(1, 2, 3), (10**6,), (-1,)])
def test_a_transcript_that_cannot_be_is_refused(output):
    world = World()
    with pytest.raises(FieldError, match="output"):
        world.scheduler.add(make_request("r", max_tokens=3), 0.0, output)
    assert not world.scheduler.has_work
