"""Structured output: the tokens that a grammar allows after each prefix of a sequence."""

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
    """A grammar in the state after a prefix, with the methods of `llguidance.LLMatcher`. It never
    raises: beyond its limits it is in an error state, and stays there."""

    def compute_bitmask(self) -> bytes:
        """Return a bit mask: bit i % 8 of byte i // 8 says whether token i may follow."""

    def try_consume_tokens(self, tokens: list[int]) -> int:
        """Consume the longest allowed run of leading tokens; return its length."""

    def validate_tokens(self, tokens: list[int]) -> int:
        """Return the length of the longest allowed run of leading tokens; consume none."""

    def rollback(self, num_tokens: int) -> bool: ...

    def is_accepting(self) -> bool:
        """Return whether the text may end here."""

    def is_error(self) -> bool: ...

    def compute_ff_bytes(self) -> bytes:
        """Return the bytes that must follow, however they are split into tokens."""


class GrammarSource(Protocol):
    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    def matcher(self, spec: StructuredOutputs) -> Matcher:
        """Return a new matcher at its initial state. Raises FieldError."""

    def plain_token(self, text: bytes) -> int | None:
        """Return the longest token (no added token) that `text` begins with, or None."""

    def forbid_repeats(self, spec: StructuredOutputs) -> ForbidRepeats | None:
        """Return the function that keeps lists from repeating an item, or None
        (`cbatch.grammars.unique_items`)."""


class Structured:
    """The processor of a grammar. EOS may follow a complete text, and after EOS only EOS.

    The matcher never consumes EOS (its rollback of EOS is not exact) nor a forbidden token. From
    EOS or a forbidden token on, tokens are only counted. No token may follow a forbidden token. A
    forbidden draft is rejected, because the logits before it forbid it. If a forbidden token is
    committed nevertheless, the request ends with an error.
    """

    def __init__(self, grammars: GrammarSource, spec: StructuredOutputs, vocab_size: int) -> None:
        self._new_matcher = partial(grammars.matcher, spec)
        self._matcher = self._new_matcher()
        self._eos_ids = frozenset(i for i in grammars.eos_ids if i < vocab_size)
        self._not_eos = np.ones(vocab_size, dtype=np.bool_)
        self._not_eos[list(self._eos_ids)] = False
        self._consumed: list[int] = []  # tokens that the matcher has consumed
        self._plain_token = grammars.plain_token
        self._forbid_repeats = grammars.forbid_repeats(spec)
        self._num_unread = 0  # tokens after `_consumed`; the first is EOS or forbidden
        self._ended = False  # whether the first unread token is EOS after a complete text

    def shape(self, row: Tensor) -> None:
        row.masked_fill_(torch.from_numpy(~self._allowed_next()).to(row.device), -torch.inf)

    def allowed_bits(self) -> NDArray[np.uint8]:
        """Return which tokens may follow: bit i % 8 of byte i // 8 is set for token i."""
        size = len(self._not_eos)
        if not self._num_unread and self._forbid_repeats is None:
            bits = np.zeros(-(-size // 8), dtype=np.uint8)
            given = np.frombuffer(self._bitmask(), dtype=np.uint8)[: len(bits)]
            bits[: len(given)] = given
            bits[-1] &= 0xFF >> -size % 8
            if int.from_bytes(bits.tobytes()).bit_count() != 1:
                return bits
        return np.packbits(self._allowed_next(), bitorder="little")

    def advance(self, token: int) -> None:
        if self._num_unread:
            self._num_unread += 1
        elif token not in self._eos_ids and self._consume(token):
            self._consumed.append(token)
        else:
            self._num_unread = 1
            self._ended = token in self._eos_ids and self._matcher.is_accepting()

    def rollback(self, count: int) -> None:
        num_unread = min(count, self._num_unread)
        self._num_unread -= num_unread
        if count > num_unread:
            del self._consumed[num_unread - count :]
            self._matcher.rollback(count - num_unread)
        if not self._num_unread and self._matcher.is_error():
            self._restart_matcher()

    def num_allowed(self, drafts: list[int]) -> int:
        """Return how many leading `drafts` the grammar allows; after EOS it allows none."""
        return 0 if self._num_unread else self._matcher.validate_tokens(drafts)

    def _allowed_next(self) -> NDArray[np.bool_]:
        """Return which tokens may follow, also after unread ones: bool [V]."""
        if not self._num_unread:
            return self._allowed()
        return ~self._not_eos if self._ended else np.zeros_like(self._not_eos)

    def _bitmask(self) -> bytes:
        """Return the matcher's bit mask after `_consumed`; empty if it is in an error state."""
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._restart_matcher()
            bits = self._matcher.compute_bitmask()
        return b"" if self._matcher.is_error() else bits

    def _allowed(self) -> NDArray[np.bool_]:
        """Return which tokens may follow `_consumed`: bool [V]."""
        size = len(self._not_eos)
        packed = np.frombuffer(self._bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(packed, count=size, bitorder="little").view(np.bool_)
        if np.count_nonzero(allowed) == 1:
            self._prefer_plain_token(allowed)
        if self._forbid_repeats is not None:
            self._forbid_repeats(allowed, self._consumed, self._has_successor)
        return allowed

    def _has_successor(self, token: int) -> bool:
        self.advance(token)
        has_next = bool(self._allowed().any())
        self.rollback(1)
        return has_next

    def _prefer_plain_token(self, allowed: NDArray[np.bool_]) -> None:
        """Correct, in place, a mask that allows one token.

        llguidance splits text that must follow as the tokenizer does. Where this text contains the
        text of an added token, the mask allows the added token, which the matcher then refuses. A
        plain token replaces it."""
        token = int(allowed.argmax())
        if token in self._eos_ids:
            is_consumable = self._matcher.is_accepting()
        else:
            is_consumable = self._matcher.validate_tokens([token]) == 1
        if not is_consumable:
            allowed[token] = False
            plain = self._plain_token(self._matcher.compute_ff_bytes())
            if plain is not None and self._matcher.validate_tokens([plain]) == 1:
                allowed[plain] = True

    def _consume(self, token: int) -> bool:
        num_consumed = self._matcher.try_consume_tokens([token])
        if self._matcher.is_error():
            self._restart_matcher()
            num_consumed = self._matcher.try_consume_tokens([token])
        return num_consumed == 1

    def _restart_matcher(self) -> None:
        """Replace the matcher by a new one after `_consumed`: the error may be due to drafts."""
        self._matcher = self._new_matcher()
        self._matcher.try_consume_tokens(self._consumed)
