"""What shapes a sequence's logits before temperature and filters, one position at a time.

Rows of target and draft go through the same processors, each after the prefix it belongs to, drafts
included. Only slots that ask for something are visited.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import SamplingParams, StructuredOutputs
from cbatch.core.scheduler.plan import NewSequence
from cbatch.runtime.model.arrays import I64
from cbatch.runtime.sampling.structured import GrammarSource, Structured


class LogitsProcessor(Protocol):
    """Shapes the logits of one sequence. Its state is a prefix of it: the known tokens, and behind
    them the drafts that are being looked at. What it does depends on that prefix alone."""

    def shape(self, row: Tensor) -> None:
        """Change `row` in place: fp32 [V], the logits of the position after the prefix."""

    def advance(self, token: int) -> None:
        """The prefix grows by `token`."""

    def rollback(self, count: int) -> None:
        """The prefix loses its last `count` tokens, of those that `advance` added."""


class _Stateless:
    """The same at every position."""

    def advance(self, token: int) -> None:
        pass

    def rollback(self, count: int) -> None:
        pass


class AllowedTokens(_Stateless):
    """Every other token is forbidden."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = _as_index(ids)

    def shape(self, row: Tensor) -> None:
        ids = self._ids.to(row.device)
        kept = row.index_select(0, ids)
        row.fill_(-torch.inf).index_copy_(0, ids, kept)


class BannedTokens(_Stateless):
    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = _as_index(ids)

    def shape(self, row: Tensor) -> None:
        row.index_fill_(0, self._ids.to(row.device), -torch.inf)


class MinTokens:
    """Stop ids are forbidden for the next `count` tokens; with `yields` not where nothing else may
    follow."""

    def __init__(self, stop_ids: Sequence[int], count: int, *, yields: bool = False) -> None:
        self._ids = _as_index(stop_ids)
        self._left, self._yields = count, yields

    def shape(self, row: Tensor) -> None:
        if self._left <= 0:
            return
        ids = self._ids.to(row.device)
        kept = row.index_select(0, ids)
        row.index_fill_(0, ids, -torch.inf)
        if self._yields and _is_empty(row):
            row.index_copy_(0, ids, kept)

    def advance(self, token: int) -> None:
        self._left -= 1

    def rollback(self, count: int) -> None:
        self._left += count


class LogitBias(_Stateless):
    def __init__(self, bias: dict[int, float]) -> None:
        self._ids = _as_index(tuple(bias))
        self._values = torch.tensor(list(bias.values()), dtype=torch.float32)

    def shape(self, row: Tensor) -> None:
        row.index_add_(0, self._ids.to(row.device), self._values.to(row.device))


class Penalties:
    """Repetition (Keskar et al. 2019, arXiv 1909.05858, section 4.1; here also for logits below 0,
    which are multiplied), then presence and frequency.

    Keeps the tokens seen as a list without repeats, so that a row costs what the sequence has used
    of the vocabulary, not the vocabulary.
    """

    def __init__(
        self, prompt: Sequence[int], *, repetition: float, presence: float, frequency: float
    ) -> None:
        self._repetition, self._presence, self._frequency = repetition, presence, frequency
        seen = dict.fromkeys(prompt) if repetition != 1 else {}
        self._place = {token: place for place, token in enumerate(seen)}
        self._num_of_prompt = len(seen)
        self._ids = np.zeros(max(2 * len(seen), 64), dtype=np.int64)
        self._ids[: len(seen)] = list(seen)
        # By place: how often it is in the output, and what presence and frequency take off.
        self._counts = np.zeros(len(self._ids), dtype=np.int64)
        self._costs = np.zeros(len(self._ids), dtype=np.float32)
        self._output: list[int] = []

    def shape(self, row: Tensor) -> None:
        used = len(self._place)
        ids = torch.from_numpy(self._ids[:used]).to(row.device)
        logits = row.index_select(0, ids)
        if self._repetition != 1:
            # The part above 0 and the part below: faster than choosing a factor for each.
            below = logits.clamp(max=0).mul_(self._repetition)
            logits = logits.clamp_(min=0).div_(self._repetition).add_(below)
        if self._presence or self._frequency:
            logits -= torch.from_numpy(self._costs[:used]).to(row.device)
        row.index_copy_(0, ids, logits)

    def advance(self, token: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids, self._counts, self._costs = (
                np.concatenate([held, np.zeros_like(held)])
                for held in (self._ids, self._counts, self._costs)
            )
        self._ids[place] = token
        self._count(place, 1)
        self._output.append(token)

    def rollback(self, count: int) -> None:
        for _ in range(count):
            token = self._output.pop()
            place = self._place[token]
            self._count(place, -1)
            # Its first time in the sequence: then it has the last place of all.
            if not self._counts[place] and place >= self._num_of_prompt:
                del self._place[token]

    def _count(self, place: int, change: int) -> None:
        self._counts[place] += change
        count = int(self._counts[place])
        self._costs[place] = self._frequency * count + (self._presence if count else 0.0)


class ProcessorChain:
    """Processors in the order in which they apply. `structured` is one of them: with it there may
    be prefixes that nothing may follow."""

    def __init__(
        self, processors: Sequence[LogitsProcessor], structured: Structured | None = None
    ) -> None:
        self._processors = tuple(processors)
        self.structured = structured

    def __len__(self) -> int:
        return len(self._processors)

    def shape(self, row: Tensor) -> bool:
        """False: no token may follow. Then `row` is 0, so that what is made of it are numbers."""
        for processor in self._processors:
            processor.shape(row)
        if self.structured is None or not _is_empty(row):
            return True
        row.zero_()
        return False

    def advance(self, token: int) -> None:
        for processor in self._processors:
            processor.advance(token)

    def rollback(self, count: int) -> None:
        for processor in self._processors:
            processor.rollback(count)


def processors_of(
    params: SamplingParams,
    stop_ids: Sequence[int],
    prompt: Sequence[int],
    vocab_size: int,
    grammars: GrammarSource | None = None,
    shared: dict[str, LogitsProcessor] | None = None,
) -> ProcessorChain:
    """What `params` ask for, after `prompt`: none, for most requests. Those without a state are
    taken from `shared` if others have put them there, with the same `params`. Raises `FieldError`
    for a structured output that `grammars` does not know."""
    chain: list[LogitsProcessor] = []
    structured = None
    if params.structured_outputs is not None:
        structured = _structured(params.structured_outputs, vocab_size, grammars)
        chain.append(structured)
    shared = {} if shared is None else shared
    if params.allowed_token_ids is not None or params.banned_token_ids:
        if "tokens" not in shared:
            shared["tokens"] = _token_lists(params)
        chain.append(shared["tokens"])
    # EOS ids come from the model's files, which may name more ids than there are logits.
    stop_ids = [i for i in stop_ids if i < vocab_size]
    if params.min_tokens and stop_ids:
        yields = structured is not None
        chain.append(MinTokens(stop_ids, params.min_tokens, yields=yields))
    if params.logit_bias:
        if "bias" not in shared:
            shared["bias"] = LogitBias(params.logit_bias)
        chain.append(shared["bias"])
    if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
        chain.append(
            Penalties(
                prompt,
                repetition=params.repetition_penalty,
                presence=params.presence_penalty,
                frequency=params.frequency_penalty,
            )
        )
    return ProcessorChain(chain, structured)


def _token_lists(params: SamplingParams) -> LogitsProcessor:
    if params.allowed_token_ids is None:
        return BannedTokens(params.banned_token_ids)
    banned = set(params.banned_token_ids)
    return AllowedTokens([i for i in params.allowed_token_ids if i not in banned])


def _structured(
    asked: StructuredOutputs, vocab_size: int, grammars: GrammarSource | None
) -> Structured:
    if grammars is None:
        remedy = "start the engine with a tokenizer"
        raise FieldError("structured_outputs", "is not served here", remedy)
    return Structured(grammars, asked, vocab_size)


class LogitsProcessors:
    """The processors of every slot. `active` bool [slots], `num_active` their number."""

    def __init__(
        self, max_slots: int, vocab_size: int, grammars: GrammarSource | None = None
    ) -> None:
        self._vocab_size, self._grammars = vocab_size, grammars
        self._chains: dict[int, ProcessorChain] = {}
        # By slot: the choices of a call have the same object, with lists as long as the vocabulary.
        self._shared: dict[int, tuple[SamplingParams, dict[str, LogitsProcessor]]] = {}
        self.active: NDArray[np.bool_] = np.zeros(max_slots, dtype=np.bool_)
        self.num_active = 0

    def admit(self, a: NewSequence) -> None:
        """Made anew from prompt and output: a preemption or a restart leaves no trace."""
        prompt = a.tokens[: a.num_prompt_tokens].tolist()
        same = (shared for params, shared in self._shared.values() if params is a.params)
        shared = next(same, {})
        chain = processors_of(
            a.params, a.stop_ids, prompt, self._vocab_size, self._grammars, shared
        )
        if len(chain):
            self._shared[a.slot] = a.params, shared
            for token in a.tokens[a.num_prompt_tokens :].tolist():
                chain.advance(token)
            self._chains[a.slot] = chain
            self.active[a.slot] = True
            self.num_active = len(self._chains)

    def release(self, slot: int) -> None:
        if self.active[slot]:
            del self._chains[slot], self._shared[slot]
            self.active[slot] = False
            self.num_active = len(self._chains)

    def shape_runs(
        self,
        logits: Tensor,
        slots: NDArray[np.integer],
        starts: I64,
        num_drafted: I64,
        drafts: I64 | None,
    ) -> dict[int, int]:
        """Shape the rows of W sequences in place: `logits[starts[i] + j]` follows the known tokens
        and the first j of the drafts of row i, j <= num_drafted[i]; `drafts` int64 [W, >= max k]
        or None. Afterwards the prefixes are the known tokens again. Returns the rows that come to a
        prefix that no token may follow, and at which j."""
        dead_ends = {}
        for i in self.active[slots].nonzero()[0].tolist():
            chain, start, depth = self._chains[int(slots[i])], int(starts[i]), int(num_drafted[i])
            for j in range(depth + 1):
                if not chain.shape(logits[start + j]):
                    dead_ends.setdefault(i, j)
                if j < depth:
                    assert drafts is not None
                    chain.advance(int(drafts[i, j]))
            chain.rollback(depth)
        return dead_ends

    def shape_each(self, logits: Tensor, slots: NDArray[np.integer]) -> None:
        """Shape one row each in place, after the present prefixes."""
        for i in self.active[slots].nonzero()[0].tolist():
            self._chains[int(slots[i])].shape(logits[i])

    def num_allowed(self, slot: int, drafts: list[int]) -> int:
        """How many of `drafts` the grammar of the slot's output lets follow one another."""
        structured = self._chains[slot].structured if self.active[slot] else None
        return len(drafts) if structured is None else structured.num_allowed(drafts)

    def advance(self, slots: NDArray[np.integer], tokens: I64, counts: I64) -> None:
        """The prefix of `slots[i]` grows by `tokens[i, : counts[i]]`."""
        for i in self.active[slots].nonzero()[0].tolist():
            for token in tokens[i, : counts[i]].tolist():
                self._chains[int(slots[i])].advance(token)

    def rollback(self, slots: NDArray[np.integer], counts: I64) -> None:
        """The prefix of `slots[i]` loses its last `counts[i]` tokens."""
        for i in self.active[slots].nonzero()[0].tolist():
            self._chains[int(slots[i])].rollback(int(counts[i]))


def _is_empty(row: Tensor) -> bool:
    """Whether every token is forbidden."""
    return row.max().item() == -torch.inf


def _as_index(ids: Sequence[int]) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.int64)
