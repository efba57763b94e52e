"""Logits processors of the sequences: applied before temperature and filters, row by row.

The target's and the drafter's logits go through the same processors, each row after its own prefix,
drafts included. Slots without processors cost nothing.
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
    """A processor of the logits of one sequence. Its state depends only on a prefix of the
    sequence: the known tokens, and then the drafts under verification."""

    def shape(self, row: Tensor) -> None:
        """Change `row` in place: fp32 [V], the logits of the position after the prefix."""

    def advance(self, token: int) -> None:
        """Append `token` to the prefix."""

    def rollback(self, count: int) -> None:
        """Remove the last `count` tokens from the prefix. All of them were added by `advance`."""


class _Stateless:
    """A processor that does the same at every position."""

    def advance(self, token: int) -> None:
        pass

    def rollback(self, count: int) -> None:
        pass


class AllowedTokens(_Stateless):
    """Forbids every token but `ids`."""

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
    """Forbids the stop ids for the next `count` tokens. With `unless_empty`, they stay allowed at
    positions where no other token is allowed."""

    def __init__(self, stop_ids: Sequence[int], count: int, *, unless_empty: bool = False) -> None:
        self._ids = _as_index(stop_ids)
        self._remaining, self._unless_empty = count, unless_empty

    def shape(self, row: Tensor) -> None:
        if self._remaining <= 0:
            return
        ids = self._ids.to(row.device)
        kept = row.index_select(0, ids)
        row.index_fill_(0, ids, -torch.inf)
        if self._unless_empty and _is_empty(row):
            row.index_copy_(0, ids, kept)

    def advance(self, token: int) -> None:
        self._remaining -= 1

    def rollback(self, count: int) -> None:
        self._remaining += count


class LogitBias(_Stateless):
    def __init__(self, bias: dict[int, float]) -> None:
        self._ids = _as_index(tuple(bias))
        self._values = torch.tensor(list(bias.values()), dtype=torch.float32)

    def shape(self, row: Tensor) -> None:
        row.index_add_(0, self._ids.to(row.device), self._values.to(row.device))


class Penalties:
    """Repetition penalty, then presence and frequency penalties.

    The repetition penalty (Keskar et al. 2019, arXiv 1909.05858, section 4.1) multiplies logits
    below 0, where the paper divides. The tokens seen are kept as a list without repeats, so the
    cost of a row grows with the distinct tokens of the sequence, not with the vocabulary.
    """

    def __init__(
        self, prompt: Sequence[int], *, repetition: float, presence: float, frequency: float
    ) -> None:
        self._repetition, self._presence, self._frequency = repetition, presence, frequency
        seen = dict.fromkeys(prompt) if repetition != 1 else {}
        self._index_of = {token: index for index, token in enumerate(seen)}
        self._num_prompt_tokens = len(seen)
        self._ids = np.zeros(max(2 * len(seen), 64), dtype=np.int64)
        self._ids[: len(seen)] = list(seen)
        # By the token's index: its count in the output, and its presence + frequency penalty.
        self._counts = np.zeros(len(self._ids), dtype=np.int64)
        self._costs = np.zeros(len(self._ids), dtype=np.float32)
        self._output: list[int] = []

    def shape(self, row: Tensor) -> None:
        used = len(self._index_of)
        ids = torch.from_numpy(self._ids[:used]).to(row.device)
        logits = row.index_select(0, ids)
        if self._repetition != 1:
            # Scaling both signs apart is faster than choosing a factor for each logit.
            below = logits.clamp(max=0).mul_(self._repetition)
            logits = logits.clamp_(min=0).div_(self._repetition).add_(below)
        if self._presence or self._frequency:
            logits -= torch.from_numpy(self._costs[:used]).to(row.device)
        row.index_copy_(0, ids, logits)

    def advance(self, token: int) -> None:
        index = self._index_of.setdefault(token, len(self._index_of))
        if index == len(self._ids):
            self._ids, self._counts, self._costs = (
                np.concatenate([array, np.zeros_like(array)])
                for array in (self._ids, self._counts, self._costs)
            )
        self._ids[index] = token
        self._count(index, 1)
        self._output.append(token)

    def rollback(self, count: int) -> None:
        for _ in range(count):
            token = self._output.pop()
            index = self._index_of[token]
            self._count(index, -1)
            # A token used for the first time has the last index, so removing it leaves no gap.
            if not self._counts[index] and index >= self._num_prompt_tokens:
                del self._index_of[token]

    def _count(self, index: int, change: int) -> None:
        self._counts[index] += change
        count = int(self._counts[index])
        self._costs[index] = self._frequency * count + (self._presence if count else 0.0)


class ProcessorChain:
    """Processors in the order in which they apply. `structured` is one of them, or None; only a
    grammar can reach a prefix that no token may follow."""

    def __init__(
        self, processors: Sequence[LogitsProcessor], structured: Structured | None = None
    ) -> None:
        self._processors = tuple(processors)
        self.structured = structured

    def __len__(self) -> int:
        return len(self._processors)

    def shape(self, row: Tensor) -> bool:
        """Apply every processor to `row`. If no token may follow, return False and zero the row, so
        that later arithmetic gives finite numbers."""
        for processor in self._processors:
            processor.shape(row)
        if self.structured is None or not _is_empty(row):
            return True
        row.zero_()
        return False

    def allowed_bits(self, vocab_size: int) -> NDArray[np.uint8]:
        """Return the tokens that no processor forbids, as `Structured.allowed_bits` does. None of
        the processors changes a logit otherwise."""
        if self.structured is not None and len(self._processors) == 1:
            return self.structured.allowed_bits()
        row = torch.zeros(vocab_size)
        may_follow = self.shape(row)
        return np.packbits((row.numpy() == 0) & may_follow, bitorder="little")

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
    """Return the processors that `params` need after `prompt`; most requests need none.

    Stateless processors are taken from `shared`, or put there; all users of a `shared` dict must
    have the same `params`. Raises FieldError for a structured output that `grammars` rejects."""
    chain: list[LogitsProcessor] = []
    structured = None
    if params.structured_outputs is not None:
        structured = _structured(params.structured_outputs, vocab_size, grammars)
        chain.append(structured)
    shared = {} if shared is None else shared
    if params.allowed_token_ids is not None or params.banned_token_ids:
        if "tokens" not in shared:
            shared["tokens"] = token_lists(params)
        chain.append(shared["tokens"])
    # EOS ids come from the model's files, which may name more ids than there are logits.
    stop_ids = [i for i in stop_ids if i < vocab_size]
    if params.min_tokens and stop_ids:
        unless_empty = structured is not None
        chain.append(MinTokens(stop_ids, params.min_tokens, unless_empty=unless_empty))
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


def token_lists(params: SamplingParams) -> LogitsProcessor:
    if params.allowed_token_ids is None:
        return BannedTokens(params.banned_token_ids)
    banned = set(params.banned_token_ids)
    return AllowedTokens([i for i in params.allowed_token_ids if i not in banned])


def _structured(
    spec: StructuredOutputs, vocab_size: int, grammars: GrammarSource | None
) -> Structured:
    return Structured(require_grammars(grammars), spec, vocab_size)


def require_grammars(grammars: GrammarSource | None) -> GrammarSource:
    """Return the grammars. Raises FieldError if there are none."""
    if grammars is None:
        remedy = "start the engine with a tokenizer"
        raise FieldError("structured_outputs", "is not supported here", remedy)
    return grammars


class LogitsProcessors:
    """The processors of all slots. `active` is bool [slots]; `num_active` counts active slots."""

    def __init__(
        self, max_num_seqs: int, vocab_size: int, grammars: GrammarSource | None = None
    ) -> None:
        self._vocab_size, self._grammars = vocab_size, grammars
        self._chains: dict[int, ProcessorChain] = {}
        # By slot. The n choices of a request share `params`, whose lists may be as long as the
        # vocabulary; they share the stateless processors, too.
        self._shared: dict[int, tuple[SamplingParams, dict[str, LogitsProcessor]]] = {}
        self.active: NDArray[np.bool_] = np.zeros(max_num_seqs, dtype=np.bool_)
        self.num_active = 0

    def admit(self, a: NewSequence) -> None:
        """Build the slot's processors from prompt and output. So a sequence that was preempted or
        restarted goes on as if it had not been."""
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
        and the first j drafts of row i, j <= num_drafted[i]. `drafts` is int64 [W, >= max k], or
        None. Afterwards the prefixes are the known tokens again. Return, for each row that reaches
        a prefix which no token may follow, the first such j."""
        dead_ends: dict[int, int] = {}
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

    def mask_run(self, slot: int, drafts: list[int], masks: NDArray[np.uint8]) -> int | None:
        """Write the tokens that the slot's processors allow, before the drafts and after each, into
        the first bytes of `masks`, uint8 [1 + k, >= V / 8]. Return the first number of drafts after
        which no token may follow, if any; all tokens are then allowed."""
        chain, dead_end = self._chains[slot], None
        for j, mask in enumerate(masks):
            bits = chain.allowed_bits(self._vocab_size)
            if not bits.any():
                dead_end, bits = j if dead_end is None else dead_end, ~bits
            mask[: len(bits)] = bits
            if j < len(drafts):
                chain.advance(drafts[j])
        chain.rollback(len(drafts))
        return dead_end

    def shape_each(self, logits: Tensor, slots: NDArray[np.integer]) -> None:
        """Shape one row for each slot in place, after the present prefixes."""
        for i in self.active[slots].nonzero()[0].tolist():
            self._chains[int(slots[i])].shape(logits[i])

    def num_allowed(self, slot: int, drafts: list[int]) -> int:
        """Return how many of the leading `drafts` the grammar of the slot's output allows."""
        structured = self._chains[slot].structured if self.active[slot] else None
        return len(drafts) if structured is None else structured.num_allowed(drafts)

    def advance(self, slots: NDArray[np.integer], tokens: I64, counts: I64) -> None:
        """Append `tokens[i, : counts[i]]` to the prefix of `slots[i]`, for every i."""
        for i in self.active[slots].nonzero()[0].tolist():
            for token in tokens[i, : counts[i]].tolist():
                self._chains[int(slots[i])].advance(token)

    def rollback(self, slots: NDArray[np.integer], counts: I64) -> None:
        """Remove the last `counts[i]` tokens from the prefix of `slots[i]`, for every i."""
        for i in self.active[slots].nonzero()[0].tolist():
            self._chains[int(slots[i])].rollback(int(counts[i]))


def _is_empty(row: Tensor) -> bool:
    return row.max().item() == -torch.inf


def _as_index(ids: Sequence[int]) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.int64)
