"""Prompt tokens of a step: as few as keep prompts fast while rows decode, shared by the prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cbatch.core.prices.chunk_sizes import ChunkSizes
from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.prices.step_costs import StepCosts
from cbatch.core.prices.step_work import StepSample, StepWork
from cbatch.core.request.errors import FieldError
from cbatch.core.scheduler.plan import StepPlan
from tests.checking.cost import LinearCost
from tests.helpers import World, decoding, make_config, make_request, prefilling, rows_of

BASE_S, TOKEN_S, PAIR_S = 5e-3, 1e-3, 3e-7
COST = LinearCost(base_s=BASE_S, token_s=TOKEN_S, context_token_s=0.0, row_s=0.0)
PROMPT_TOKENS = 1900


class Attending(LinearCost, frozen=True):
    """A step also takes time for each (query, key) pair, and varies by a share `noise`."""

    noise: float = 0.0

    def step_s(self, work: StepWork) -> tuple[float, float, float]:
        draft_s, target_s, host_s = super().step_s(work)
        target_s += PAIR_S * work.decode_pairs
        wave = np.sin(1e4 * target_s + 7.3 * work.context_tokens)
        return draft_s, target_s * (1 + self.noise * float(wave)), host_s


def sizes(**more: object) -> dict[str, object]:
    return {
        "num_blocks": 1024,
        "max_model_len": 2048,
        "max_num_batched_tokens": 1024,
        "block_size": 16,
        "prompt_share": 0.9,
        **more,
    }


def world_of(cost: LinearCost = COST, *, depth: int = 0, **more: object) -> World:
    """Return a world with four rows that decode, past their prompts."""
    world = World(make_config(**sizes(**more)), depth=depth, cost=cost)
    world.add(*(make_request(f"stream {i}", 8, max_tokens=900) for i in range(4)))
    for _ in range(40):
        world.step()
    return world


def prompt_tokens(world: World, plan: StepPlan) -> int:
    rows = rows_of(world, plan)
    return sum(row["query_len"] for name, row in rows.items() if not name.startswith("stream"))


def read_prompts(world: World, *prompts: int) -> tuple[list[int], list[float]]:
    """Return prompt tokens and seconds of each step until prompts of these lengths are read."""
    for number, tokens in enumerate(prompts):
        name = f"prompt {number} {world.clock()}"
        world.add(make_request(name, tokens, max_tokens=1))
    return steps_until(world, lambda: not world.scheduler.state.prefilling)


def steps_until(world: World, done: object) -> tuple[list[int], list[float]]:
    tokens, seconds = [], []
    for _ in range(3000):
        before_s = world.clock()
        world.step()
        tokens.append(prompt_tokens(world, world.plans[-1]))
        seconds.append(world.clock() - before_s)
        if done():
            return tokens, seconds
    raise AssertionError("the prompts were not read")


# ---- how many tokens -----------------------------------------------------------------------------


def chunk_by(profile: CostProfile, share: float = 0.95) -> int:
    """Return the chunk that joins one row, once the largest chunk was measured."""
    sizes = ChunkSizes(StepCosts(profile), 1024, share)
    sizes.observe(StepSample(prefilling(1, 1024), 0.0, 0.0), None)
    return sizes.chunk(decoding(1), 0, 0, None)


def test_the_chosen_chunk_is_the_least_that_keeps_prompts_fast() -> None:
    chosen = chunk_by(CostProfile(BASE_S, TOKEN_S))
    best = 1024 / (BASE_S + TOKEN_S * 1024)
    speed_of = [n / (BASE_S + TOKEN_S * (1 + n)) for n in (chosen, chosen // 2)]
    assert speed_of[0] >= 0.95 * best > speed_of[1]


def test_where_steps_cost_the_same_the_whole_budget_is_taken() -> None:
    """As on a GPU that is limited by reading its weights."""
    assert chunk_by(CostProfile(BASE_S)) >= 0.9 * 1024 / 2 ** (1 / 4)


def test_prompts_with_a_slot_count_as_rows() -> None:
    """Else few rows decode while chunks are small, and many while they are large."""
    sizes = ChunkSizes(StepCosts(CostProfile(BASE_S, TOKEN_S)), 1024, 0.8)
    sizes.observe(StepSample(prefilling(1, 1024), 0.0, 0.0), None)
    few, many, alone = (
        sizes.chunk(decoding(rows), 0, prompts, None)
        for rows, prompts in ((2, 30), (30, 2), (2, 0))
    )
    assert few == many > 2 * alone


@pytest.mark.parametrize("depth", [0, 1])
def test_streams_do_not_wait_for_a_prompt(depth: int) -> None:
    world = world_of(depth=depth)
    read_prompts(world, PROMPT_TOKENS)  # prices are learned
    tokens, seconds = read_prompts(world, PROMPT_TOKENS)
    best = 1024 / (BASE_S + TOKEN_S * 1024)
    chunk = int(np.median([count for count in tokens if count]))
    assert chunk < 256
    assert chunk / (BASE_S + TOKEN_S * chunk) >= 0.8 * best
    assert max(seconds) < 0.3  # a step of the whole budget takes 1.03 s
    assert sum(tokens) >= PROMPT_TOKENS - chunk


def test_a_share_of_1_takes_the_whole_budget() -> None:
    tokens, _ = read_prompts(world_of(prompt_share=1.0), PROMPT_TOKENS)
    assert tokens[:2] == [1020, 880]


def test_nothing_decodes_and_the_whole_budget_is_taken() -> None:
    world = World(make_config(**sizes()), cost=COST)
    tokens, _ = read_prompts(world, 1000, 1000)
    assert tokens[0] == 1000 + 24  # the budget
    world.run()
    world.assert_reference()


def test_a_first_prompt_is_read_in_small_chunks() -> None:
    _, seconds = read_prompts(world_of(), PROMPT_TOKENS)
    assert max(seconds) < 0.3


# ---- a target ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lookahead", "depth"), [("off", 1), ("fixed:4", 0), ("adaptive:4", 1)])
def test_a_target_is_kept(lookahead: str, depth: int) -> None:
    cost = Attending(base_s=BASE_S, token_s=TOKEN_S, context_token_s=0.0, row_s=0.0, noise=0.1)
    world = world_of(cost, depth=depth, lookahead=lookahead, itl_target_s=0.05)
    read_prompts(world, *[PROMPT_TOKENS] * 2)
    tokens, seconds = read_prompts(world, *[PROMPT_TOKENS] * 3)
    assert np.mean(np.array(seconds) > 0.05) <= 0.01
    assert np.median(tokens) > 10
    assert len(set(tokens)) > 3  # contexts grow and chunks shrink
    untargeted = world_of(cost, depth=depth, lookahead=lookahead)
    _, longer = read_prompts(untargeted, *[PROMPT_TOKENS] * 2)
    assert np.mean(np.array(longer) > 0.05) > 0.3


def test_drafts_shrink_before_a_target_is_missed() -> None:
    """Steps of 4 rows with 4 drafts each take 25 ms without a prompt."""
    drafts = {}
    for target_s in (None, 0.05, 0.012):
        world = world_of(lookahead="fixed:4", itl_target_s=target_s, draft_context_tokens=2048)
        first = len(world.plans)
        read_prompts(world, PROMPT_TOKENS)
        for _ in range(40):
            world.step()
        plans = world.plans[first:]
        drafts[target_s] = [int(plan.num_drafts.sum()) for plan in plans]
        if target_s is not None:
            durations = np.array([BASE_S + TOKEN_S * plan.query_lens.sum() for plan in plans])
            assert np.mean(durations[5:] > max(target_s, 0.017)) <= 0.02
    assert max(drafts[None]) == 16 and max(drafts[0.05]) == 16
    assert max(drafts[0.012][40:]) < 4


@pytest.mark.parametrize("chunk", [0, 100])
@pytest.mark.parametrize(
    "dear", ["logit_s", "verify_s", "draft_pass_s", "draft_token_s", "chunk_s"]
)
def test_drafts_take_the_time_that_a_target_leaves(dear: str, chunk: int) -> None:
    """One price is far above the others. The step with these drafts keeps its share of the target,
    and one with a few more does not."""
    profile = CostProfile(BASE_S, 1e-5, context_s=1e-7, **{dear: 1e-3})
    rows, context, target_s, depth = 10, 500, 0.1, 4
    work = StepWork.decoding(rows, context)
    sizes = ChunkSizes(StepCosts(profile), 1024, 0.8)
    drafts = sizes.drafts_within(target_s, work, depth, chunk)

    def step_s(count: int) -> float:
        work = StepWork.decoding(rows, context)
        work.target_tokens = work.logit_tokens = rows + count
        work.draft_tokens, work.draft_depth = count, min(count, depth)
        if chunk:
            work.target_tokens += chunk
            work.context_tokens, work.prefill_tokens = context + chunk, chunk
        return sum(profile.step_s(work))

    assert 0 < drafts < 1024 or step_s(1024) < target_s
    assert step_s(drafts) <= target_s * 0.7 + 1e-9
    assert drafts == 1024 or step_s(int(1.1 * drafts) + 1) > target_s * 0.7


def test_a_request_may_bring_a_target_of_its_own() -> None:
    world = world_of(itl_target_s=None)
    read_prompts(world, PROMPT_TOKENS)
    _, usual = read_prompts(world, PROMPT_TOKENS)
    world.add(make_request("stream of its own", 8, max_tokens=900, itl_target_s=0.03))
    for _ in range(3):
        world.step()
    _, short = read_prompts(world, PROMPT_TOKENS)
    assert np.median(usual) > 0.04
    assert np.mean(np.array(short) > 0.03) <= 0.02


def test_a_short_target_of_one_request_is_raised_to_the_floor() -> None:
    world = world_of(min_itl_target_s=0.05)
    read_prompts(world, PROMPT_TOKENS)
    world.add(make_request("stream of its own", 8, max_tokens=900, itl_target_s=1e-3))
    for _ in range(3):
        world.step()
    tokens, seconds = read_prompts(world, PROMPT_TOKENS)
    assert np.median(tokens) > 20
    assert np.mean(np.array(seconds) > 0.05) <= 0.02


@pytest.mark.parametrize("hostile_s", [1e-3, 0.0131])
def test_the_target_of_one_request_changes_the_chunks_of_no_other_target(hostile_s: float) -> None:
    """`hostile_s` can be met by no step, or by some steps."""
    cost = Attending(base_s=BASE_S, token_s=TOKEN_S, noise=0.1)
    typical = []
    for attacked in (False, True):
        world = world_of(cost, itl_target_s=0.05)
        read_prompts(world, PROMPT_TOKENS)
        if attacked:
            own = {"itl_target_s": hostile_s}
            world.add(make_request("stream of another", 8, max_tokens=60, **own))
            read_prompts(world, 600)
            steps_until(world, lambda finished=world.finished: "stream of another" in finished)
        tokens, _ = read_prompts(world, PROMPT_TOKENS)
        typical.append(np.median(tokens))
    assert typical[1] >= 0.8 * typical[0] > 10


def test_prompts_go_on_where_no_step_keeps_the_target() -> None:
    world = world_of(itl_target_s=1e-3)
    tokens, _ = read_prompts(world, 200)
    assert min(count for count in tokens[:-1]) >= 8


def test_pairs_of_very_long_contexts_are_counted() -> None:
    """Four contexts of 2^29 tokens have more pairs than an int32 holds: the step is too long by
    far, so that the prompt gets its least chunk."""
    world = world_of(Attending(base_s=BASE_S, token_s=TOKEN_S), itl_target_s=0.05)
    read_prompts(world, 400)
    table, rows = world.scheduler.state.table, world.scheduler.state.decoding
    table.num_tokens[rows] = 2**29
    table.capacity[rows] = table.max_total[rows] = 2**30
    world.add(make_request("prompt", 400))
    plan = world.scheduler.schedule(world.clock())
    assert plan is not None and plan.query_lens.tolist() == [1, 1, 1, 1, 8]


@pytest.mark.parametrize("decoding", [0, 4])
def test_the_price_of_a_prompt_token_is_what_prompts_take(decoding: int) -> None:
    world = world_of() if decoding else World(make_config(**sizes()), cost=COST)
    for _ in range(3):
        read_prompts(world, PROMPT_TOKENS)
    world.add(make_request("last", PROMPT_TOKENS, max_tokens=1))
    world.step()
    estimate_s = world.scheduler.remaining_prompt_tokens * world.scheduler.prompt_token_s
    began_s = world.clock()
    while "last" not in world.finished:
        world.step()
    assert estimate_s == pytest.approx(world.clock() - began_s, rel=0.15)


def test_a_target_of_nothing_is_refused() -> None:
    with pytest.raises(FieldError, match="itl_target_s"):
        make_config(itl_target_s=0.0)
    with pytest.raises(FieldError, match="min_itl_target_s"):
        make_config(min_itl_target_s=-1.0)


# ---- several prompts -----------------------------------------------------------------------------


def order_of_ends(world: World, names: list[str]) -> list[str]:
    ends: list[str] = []
    for _ in range(3000):
        world.step()
        ends += [name for name in names if name in world.finished and name not in ends]
        if len(ends) == len(names):
            return ends
    raise AssertionError("they did not end")


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_short_prompt_does_not_wait_for_a_long_one(policy: str) -> None:
    world = world_of(queue_policy=policy)
    world.add(make_request("long", PROMPT_TOKENS, max_tokens=1))
    for _ in range(3):
        world.step()
    world.add(make_request("short", 60, max_tokens=1))
    assert order_of_ends(world, ["long", "short"]) == ["short", "long"]


def test_a_long_prompt_is_overtaken_by_as_many_tokens_as_it_has_at_most() -> None:
    world = world_of()
    world.add(make_request("long", 600, max_tokens=1))
    overtaken = 0
    for number in range(3000):
        if number % 2 == 0:
            world.add(make_request(f"short {number}", 100, max_tokens=1))
        world.step()
        rows = rows_of(world, world.plans[-1])
        overtaken += sum(r["query_len"] for n, r in rows.items() if n.startswith("short"))
        if "long" in world.finished:
            break
    assert 300 < overtaken <= 600 + 2 * 128


@pytest.mark.parametrize(
    ("first", "second", "order"),
    [
        ({"prompt": PROMPT_TOKENS, "priority": -1}, {"prompt": 60}, [0, 1]),
        ({"prompt": 900}, {"prompt": PROMPT_TOKENS, "priority": -1}, [1, 0]),
    ],
)
def test_priority_comes_before_length(first: Any, second: Any, order: list[int]) -> None:
    world, names = world_of(queue_policy="priority"), ["first", "second"]
    world.add(make_request("first", max_tokens=1, **first))
    for _ in range(3):
        world.step()
    world.add(make_request("second", max_tokens=1, **second))
    assert order_of_ends(world, names) == [names[i] for i in order]


def test_waiting_requests_are_admitted_in_the_order_of_their_arrival() -> None:
    world = world_of(max_num_seqs=5)
    for number, tokens in enumerate((900, 700, 60)):
        world.add(make_request(f"prompt {number}", tokens, max_tokens=1))
    names = [f"prompt {number}" for number in range(3)]
    assert order_of_ends(world, names) == names  # one slot is free


# ---- chunks decide no token ----------------------------------------------------------------------


@pytest.mark.parametrize(("lookahead", "depth"), [("off", 1), ("fixed:3", 0)])
def test_chunk_sizes_move_no_token(lookahead: str, depth: int) -> None:
    outputs, chunks = [], []
    for target_s, noise in ((None, 0.0), (0.05, 0.3), (0.03, 0.1)):
        cost = Attending(base_s=BASE_S, token_s=TOKEN_S, noise=noise)
        world = World(
            make_config(**sizes(lookahead=lookahead, itl_target_s=target_s)), depth=depth, cost=cost
        )
        for number in range(4):
            world.add(make_request(f"stream {number}", 9 + number, max_tokens=200, temperature=1.0))
        for _ in range(5):
            world.step()
        world.add(*(make_request(f"p{i}", 300 + 70 * i, max_tokens=20) for i in range(3)))
        world.run()
        world.assert_reference()
        outputs.append({name: world.output(name) for name in world.requests})
        chunks.append([n for plan in world.plans if (n := int(plan.query_lens.max())) > 6])
    assert outputs[0] == outputs[1] == outputs[2]
    assert chunks[0] != chunks[1] != chunks[2]
    assert all(len(set(of_one)) > 2 for of_one in chunks)
    assert len({size for of_one in chunks for size in of_one}) > 6
