"""A sequence whose text has a grammar: the tokens that may follow each prefix of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.core.request.request import StructuredOutputs

ForbidRepeats = Callable[[NDArray[np.bool_], list[int], Callable[[int], bool]], None]


class Matcher(Protocol):
    """A grammar in the state that a prefix leads to, as `llguidance.LLMatcher` has it. It never
    raises: beyond its limits it is in error, and stays so."""

    def compute_bitmask(self) -> bytes:
        """Bit i % 8 of byte i // 8: whether token i may follow."""

    def try_consume_tokens(self, tokens: list[int]) -> int:
        """How many of them may follow one another; it goes on behind these."""

    def validate_tokens(self, tokens: list[int]) -> int:
        """The same, staying where it is."""

    def rollback(self, num_tokens: int) -> bool: ...

    def is_accepting(self) -> bool:
        """Whether the text may end here."""

    def is_error(self) -> bool: ...

    def compute_ff_bytes(self) -> bytes:
        """Return the text that must follow, whatever its tokens."""


class GrammarSource(Protocol):
    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    def matcher(self, asked: StructuredOutputs) -> Matcher:
        """At its beginning, and the caller's own. Raises `FieldError`."""

    def plain_token(self, text: bytes) -> int | None:
        """Return the longest token that `text` begins with, added tokens aside, or None."""

    def forbid_repeats(self, asked: StructuredOutputs) -> ForbidRepeats | None:
        """Return what keeps lists from repeating an item (`cbatch.grammars.unique_items`)."""


class Structured:
    """The processor of a grammar. EOS may follow a complete text, and after EOS only EOS.

    The matcher never consumes EOS (its rollback of EOS is not exact) nor a forbidden token: from
    the first of these on tokens are only counted. After a forbidden token nothing may follow. As a
    draft it is rejected, because the row before forbids it; if it was committed all the same, the
    request ends with an error.
    """

    def __init__(self, grammars: GrammarSource, asked: StructuredOutputs, vocab_size: int) -> None:
        self._make = partial(grammars.matcher, asked)
        self._matcher = self._make()
        self._eos_ids = frozenset(i for i in grammars.eos_ids if i < vocab_size)
        self._not_eos = np.ones(vocab_size, dtype=np.bool_)
        self._not_eos[list(self._eos_ids)] = False
        self._taken: list[int] = []  # by the matcher
        self._plain_token = grammars.plain_token
        self._forbid_repeats = grammars.forbid_repeats(asked)
        self._behind = 0  # tokens after those, EOS or the forbidden one first
        self._ended = False  # whether the first of these is EOS after a complete text

    def shape(self, row: Tensor) -> None:
        if self._behind:
            if self._ended:
                _forbid(row, self._not_eos)
            else:
                row.fill_(-torch.inf)
            return
        _forbid(row, ~self._allowed())

    def advance(self, token: int) -> None:
        if self._behind:
            self._behind += 1
        elif token not in self._eos_ids and self._take(token):
            self._taken.append(token)
        else:
            self._behind = 1
            self._ended = token in self._eos_ids and self._matcher.is_accepting()

    def rollback(self, count: int) -> None:
        counted = min(count, self._behind)
        self._behind -= counted
        if count > counted:
            del self._taken[counted - count :]
            self._matcher.rollback(count - counted)
        if not self._behind and self._matcher.is_error():
            self._renew()

    def num_allowed(self, drafts: list[int]) -> int:
        """How many of `drafts` may follow one another; behind EOS none does."""
        return 0 if self._behind else self._matcher.validate_tokens(drafts)

    def _allowed(self) -> NDArray[np.bool_]:
        """Return which tokens may follow those that the matcher has taken: bool [V]."""
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._renew()
            bits = self._matcher.compute_bitmask()
        size = len(self._not_eos)
        if self._matcher.is_error():
            return np.zeros(size, dtype=np.bool_)
        packed = np.frombuffer(bits, dtype=np.uint8)
        allowed = np.unpackbits(packed, count=size, bitorder="little").view(np.bool_)
        if np.count_nonzero(allowed) == 1:
            self._keep_text_plain(allowed)
        if self._forbid_repeats is not None:
            self._forbid_repeats(allowed, self._taken, self._leads_on)
        return allowed

    def _leads_on(self, token: int) -> bool:
        """Return whether any token may follow `token`."""
        self.advance(token)
        found = bool(self._allowed().any())
        self.rollback(1)
        return found

    def _keep_text_plain(self, allowed: NDArray[np.bool_]) -> None:
        """Correct, in place, a mask that allows one token. llguidance writes text that must follow
        in the tokenizer's own tokens. Where the text holds the text of an added token, that is the
        added token, which the matcher then refuses; a plain token takes its place."""
        token = int(allowed.argmax())
        if token in self._eos_ids:
            follows = self._matcher.is_accepting()
        else:
            follows = self._matcher.validate_tokens([token]) == 1
        if not follows:
            allowed[token] = False
            plain = self._plain_token(self._matcher.compute_ff_bytes())
            if plain is not None and self._matcher.validate_tokens([plain]) == 1:
                allowed[plain] = True

    def _take(self, token: int) -> bool:
        taken = self._matcher.try_consume_tokens([token])
        if self._matcher.is_error():
            self._renew()
            taken = self._matcher.try_consume_tokens([token])
        return taken == 1

    def _renew(self) -> None:
        """What drafts brought to its limits, the known tokens alone may not."""
        self._matcher = self._make()
        self._matcher.try_consume_tokens(self._taken)


def _forbid(row: Tensor, forbidden: NDArray[np.bool_]) -> None:
    row.masked_fill_(torch.from_numpy(forbidden).to(row.device), -torch.inf)
