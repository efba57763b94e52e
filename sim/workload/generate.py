"""Synthetic workloads: requests from arrivals and lengths, and conversations of several turns.

Arrivals, prompts and outputs each have a random stream of their own, derived from one seed. So
another arrival process does not change the lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from cbatch.core.request.errors import FieldError
from sim.workload.lengths import Lengths
from sim.workload.traces.request import TraceRequest

CHUNK = 1024  # requests whose lengths are drawn at once
BLOCK_TOKENS = 16  # tokens per id in `hash_ids`, which name shared prefix blocks
Arrivals = Callable[[np.random.Generator], Iterator[float]]


def generate(
    arrivals: Arrivals, prompts: Lengths, outputs: Lengths, *, requests: int, seed: int
) -> Iterator[TraceRequest]:
    """Yield `requests` requests that share no prefix; the first arrives at 0."""
    _require_some("requests", requests)
    for_arrivals, for_prompts, for_outputs = _streams(seed, 3)
    times_s = arrivals(for_arrivals)
    first_s: float | None = None
    for start in range(0, requests, CHUNK):
        count = min(CHUNK, requests - start)
        prompt_tokens = prompts(for_prompts, count).tolist()
        output_tokens = outputs(for_outputs, count).tolist()
        for time_s, prompt, output in zip(times_s, prompt_tokens, output_tokens, strict=False):
            first_s = time_s if first_s is None else first_s
            yield TraceRequest(
                arrival_s=time_s - first_s, prompt_tokens=prompt, output_tokens=output
            )


class Conversations(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions of `turns` turns. A turn's prompt is everything before it and a new message. Each
    session starts with one of `system_prompts` system prompts, chosen in rotation. `think_s` is the
    mean of the exponential pause before a turn."""

    turns: Lengths
    messages: Lengths
    outputs: Lengths
    system_prompts: int = 1
    system_prompt_tokens: int = 0
    think_s: float = 5.0

    def __post_init__(self) -> None:
        _require_some("system_prompts", self.system_prompts)
        for field, value in (
            ("system_prompt_tokens", self.system_prompt_tokens),
            ("think_s", self.think_s),
        ):
            if not 0 <= value < float("inf"):
                raise FieldError(field, f"{value} is not allowed", "give 0 or more")


def converse(
    arrivals: Arrivals, conversations: Conversations, *, sessions: int, seed: int
) -> Iterator[TraceRequest]:
    """Yield the turns of `sessions` sessions, session by session in order of their first arrival.
    All turns of a session have the same `arrival_s`; `think_s` delays the later ones (see
    `sim.workload.sources.OpenLoop`). Block names and tokens continue within a session, so a turn
    finds the answers before it in the prefix cache. Sessions share the whole blocks of a system
    prompt."""
    _require_some("sessions", sessions)
    for_arrivals, for_turns, for_messages, for_outputs, for_thoughts = _streams(seed, 5)
    times_s = arrivals(for_arrivals)

    system_blocks = conversations.system_prompt_tokens // BLOCK_TOKENS
    next_name = conversations.system_prompts * system_blocks
    first_s: float | None = None
    for number in range(sessions):
        start_s = next(times_s)
        first_s = start_s if first_s is None else first_s
        turns = int(conversations.turns(for_turns, 1)[0])
        messages = conversations.messages(for_messages, turns).tolist()
        outputs = conversations.outputs(for_outputs, turns).tolist()
        thoughts_s = for_thoughts.exponential(conversations.think_s, turns).tolist()
        system = number % conversations.system_prompts * system_blocks
        shared = tuple(range(system, system + system_blocks))
        known_tokens = conversations.system_prompt_tokens
        for turn in range(turns):
            prompt_tokens = known_tokens + messages[turn]
            own = -(-prompt_tokens // BLOCK_TOKENS) - system_blocks
            yield TraceRequest(
                arrival_s=start_s - first_s,
                prompt_tokens=prompt_tokens,
                output_tokens=outputs[turn],
                hash_ids=(*shared, *range(next_name, next_name + own)),
                hash_block_tokens=BLOCK_TOKENS,
                session=f"s{number}",
                think_s=thoughts_s[turn] if turn else None,
            )
            known_tokens = prompt_tokens + outputs[turn]
        next_name += -(-known_tokens // BLOCK_TOKENS) - system_blocks


def _streams(seed: int, count: int) -> list[np.random.Generator]:
    return [np.random.default_rng(stream) for stream in np.random.SeedSequence(seed).spawn(count)]


def _require_some(field: str, value: int) -> None:
    if value < 1:
        raise FieldError(field, f"{value} is not allowed", "give at least 1")
