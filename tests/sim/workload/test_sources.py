from __future__ import annotations

import itertools

import numpy as np
import pytest

from cbatch.core.request.errors import FieldError
from sim.workload.arrivals import poisson
from sim.workload.generate import BLOCK_TOKENS, Conversations, converse, generate
from sim.workload.lengths import fixed, uniform
from sim.workload.sources import ClosedLoop, OpenLoop, Source
from sim.workload.tokens import VOCAB_SIZE, TracePrompts
from sim.workload.traces.request import TraceRequest


def request(arrival_s: float, prompt: int = 5, output: int = 2, **more) -> TraceRequest:
    return TraceRequest(arrival_s=arrival_s, prompt_tokens=prompt, output_tokens=output, **more)


def take(source: Source) -> TraceRequest:
    return source.take()[1]


def test_open_loop_follows_the_trace_and_reads_one_ahead() -> None:
    read = []

    def trace():
        for i in range(5):
            read.append(i)
            yield request(i * 1.5)

    source = OpenLoop(trace())
    for i in range(5):
        assert source.next_arrival_s() == i * 1.5
        assert take(source).arrival_s == i * 1.5
        assert len(read) == min(i + 2, 5)
    assert source.next_arrival_s() is None


def test_turns_wait_for_the_answer_before_them() -> None:
    turns = [
        request(0, session="a"),
        request(0, session="a", think_s=2.0),
        request(0, session="a", think_s=3.0),
        request(1, session="b"),
        request(1, session="b", think_s=0.5),
    ]
    source = OpenLoop(turns)
    first = take(source)
    assert source.next_arrival_s() == 1
    second = take(source)
    assert source.next_arrival_s() is None, "no request has an answer yet"
    source.ended(first, 10.0)
    assert source.next_arrival_s() == 12.0
    source.ended(second, 10.1)
    assert source.next_arrival_s() == 10.6
    assert take(source).session == "b"
    third = take(source)
    assert (third.session, third.arrival_s) == ("a", 12.0)
    source.ended(third, 13.0)
    assert take(source).arrival_s == 16.0
    source.ended(third, 17.0)
    assert source.next_arrival_s() is None


def test_a_turn_read_after_the_answer_still_thinks() -> None:
    """The turn before it has ended by the time that its line is read. Logs of real sessions, which
    have their own stamps, are like this. Requests that come meanwhile are read all the same."""
    source = OpenLoop(
        [
            request(0.0, session="a"),
            request(5.0),
            request(5.5, session="a", think_s=2.0),
            request(6.0),
            request(9.0, session="a", think_s=0.5),
        ]
    )
    source.ended(take(source), 4.0)
    assert take(source).arrival_s == 5.0
    assert [take(source).arrival_s for _ in range(2)] == [6.0, 6.0], "4 s and 2 of thinking"
    assert source.next_arrival_s() is None, "the last waits for an answer"
    source.ended(request(6.0, session="a"), 7.0)
    assert take(source).arrival_s == 9.0, "its own time is later"
    # A long think time does not delay requests that come meanwhile.
    slow = OpenLoop(
        [request(0, session="a"), request(1), request(2, session="a", think_s=50), request(3)]
    )
    slow.ended(take(slow), 0.5)
    assert [take(slow).arrival_s for _ in range(3)] == [1, 3, 50.5]


def test_closed_loop_keeps_a_number_of_requests_open() -> None:
    source = ClosedLoop((request(99.0, prompt=i) for i in range(1, 6)), 2, think_s=0.5)
    first, second = take(source), take(source)
    assert (first.arrival_s, second.arrival_s, source.next_arrival_s()) == (0, 0, None)
    source.ended(second, 3.0)
    assert source.next_arrival_s() == 3.5
    assert take(source).prompt_tokens == 3
    source.ended(first, 4.0)
    assert take(source).arrival_s == 4.5
    for _ in range(2):
        source.ended(first, 9.0)
    assert take(source).prompt_tokens == 5
    assert source.next_arrival_s() is None, "the list is at its end"


def test_generated_requests_have_streams_of_their_own() -> None:
    def make(rate: float, seed: int = 4, prompt=None):
        arrivals = lambda rng: poisson(rate, rng)  # noqa: E731
        lengths = prompt or uniform(1, 99), uniform(1, 9)
        return list(generate(arrivals, *lengths, requests=1500, seed=seed))

    base = make(2.0)
    assert len(base) == 1500 and base[0].arrival_s == 0
    assert base == make(2.0) != make(2.0, seed=5)
    faster = make(4.0)
    assert [r.prompt_tokens for r in faster] == [r.prompt_tokens for r in base]
    assert faster[-1].arrival_s == pytest.approx(base[-1].arrival_s / 2)
    other = make(2.0, prompt=fixed(3))
    assert [r.output_tokens for r in other] == [r.output_tokens for r in base]
    with pytest.raises(FieldError, match="requests"):
        list(generate(lambda rng: poisson(1, rng), fixed(1), fixed(1), requests=0, seed=0))


def conversations(**more) -> list[TraceRequest]:
    settings = {
        "turns": uniform(1, 4),
        "messages": uniform(3, 40),
        "outputs": uniform(2, 30),
        "system_prompts": 2,
        "system_prompt_tokens": 37,
        "think_s": 2.0,
    }
    made = Conversations(**(settings | more))
    return list(converse(lambda rng: poisson(1.0, rng), made, sessions=20, seed=1))


def prompts_of(requests: list[TraceRequest]) -> list[np.ndarray]:
    maker = TracePrompts()
    return [maker.prompt(r) for r in requests]


def shared(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of equal leading tokens."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size


def test_sessions_share_their_system_prompt_and_no_more() -> None:
    requests = conversations()
    firsts = [i for i, r in enumerate(requests) if r.think_s is None]
    prompts = prompts_of(requests)
    whole = 37 // BLOCK_TOKENS * BLOCK_TOKENS
    for (n, i), (m, j) in itertools.combinations(enumerate(firsts), 2):
        assert shared(prompts[i], prompts[j]) == (whole if n % 2 == m % 2 else 0)
    alone = prompts_of(conversations(system_prompt_tokens=0))
    assert all(shared(alone[i], alone[j]) == 0 for i, j in itertools.combinations(firsts, 2))


def test_prompts_share_what_their_names_share() -> None:
    maker = TracePrompts()
    named = {"hash_block_tokens": 4}
    one = maker.prompt(request(0, 10, hash_ids=(3, 5, 7), **named))
    two = maker.prompt(request(0, 9, hash_ids=(3, 5, 8), **named))
    tail = maker.prompt(request(0, 11, hash_ids=(3, 5), **named))  # its last block has no name
    none = maker.prompt(request(0, 10))
    same = maker.prompt(request(0, 10))
    assert [len(p) for p in (one, two, tail, none)] == [10, 9, 11, 10]
    assert (shared(one, two), shared(one, tail), shared(none, same)) == (8, 8, 0)
    huge = maker.prompt(request(0, 8, hash_ids=(2**63, 1), **named))
    assert huge.dtype == np.int32 and huge.min() >= 0 and huge.max() < VOCAB_SIZE
