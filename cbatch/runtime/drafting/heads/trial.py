"""Agreement of a head's first drafts with its target on sample text. It decides between the
readings of an ambiguous config, and rejects heads that are no better than a constant guess.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from cbatch.core.request.errors import FieldError
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.drafting.heads.head import Head
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.arrays import iota

_BLOCK_TOKENS = 16
# Above what a guess reaches, on all texts together or on one of five. About 3 % of the heads that
# only guess pass each of both.
_STANDARD_ERRORS, _STANDARD_ERRORS_OF_ONE = 2.0, 2.6
_logger = logging.getLogger("cbatch")
H = TypeVar("H", bound=Head)


class HeadTrial(NamedTuple, Generic[H]):
    """The first drafts of a head on sample text: `hits` (bool [trials]) marks drafts equal to the
    target's greedy choice. `is_chance`: on all texts and on each, their share is what the best
    token would reach as every draft, or not significantly more."""

    head: H
    hits: Tensor
    is_chance: bool

    @property
    def trials(self) -> int:
        return len(self.hits)

    @property
    def agreement(self) -> float:
        return float(self.hits.float().mean())

    def beats(self, other: HeadTrial[H]) -> bool:
        """Return whether this head has more hits than the other, by more than two standard errors
        of the difference."""
        wins, losses = int((self.hits & ~other.hits).sum()), int((other.hits & ~self.hits).sum())
        return wins - losses > 2 * (wins + losses) ** 0.5


def take_head(
    path: str | Path, heads: Sequence[H], target: Any, texts: Sequence[Sequence[int]]
) -> H:
    """Return the reading of the head's files at `path` that predicts the target best on `texts`.
    With tensor parallelism all ranks must call it. Raises FieldError for a head that is no better
    than always guessing one token."""
    best = best_reading(heads, target, texts)
    summary = f"draft {path}: {best.head.head}; {best.agreement:.0%} of {best.trials} first "
    summary += "drafts are the model's own choice"
    if best.is_chance:
        problem = f"{summary}, no more than always guessing the same token, on any text"
        raise FieldError("draft", problem, "use a head that was trained for this model")
    _logger.info("%s", summary)
    return best.head


@torch.inference_mode()
def best_reading(heads: Sequence[H], target: Any, texts: Sequence[Sequence[int]]) -> HeadTrial[H]:
    """Return the first (likeliest) reading, or a later reading that `beats` it. `texts` are token
    ids. `target` is a `Model` on a CPU, a `OneCall` on a GPU."""
    previous = target.hidden_layers
    try:
        tested = [_test(head, target, texts) for head in heads]
    finally:
        target.keep_hidden(previous)
    best = tested[0]
    for other in tested[1:]:
        if other.beats(best):
            best = other
    return best


def _test(head: H, target: Any, texts: Sequence[Sequence[int]]) -> HeadTrial[H]:
    hits, choices = [], []
    for tokens in texts:
        ids = torch.tensor(tokens, dtype=torch.int64)
        chosen, hidden = read_states(target, head.head.hidden_layers, ids)
        drafts = head.first_logits(whole_text(ids), fresh_kv(head, len(ids)), hidden).argmax(-1)
        hits.append((drafts == chosen)[1:])
        choices.append(chosen[1:])
    is_chance = _is_chance(torch.cat(hits), torch.cat(choices), _STANDARD_ERRORS)
    for of_text in zip(hits, choices, strict=True):
        is_chance &= _is_chance(*of_text, _STANDARD_ERRORS_OF_ONE)
    return HeadTrial(head, torch.cat(hits), is_chance)


def _is_chance(hits: Tensor, choices: Tensor, standard_errors: float) -> bool:
    chance = float(choices.bincount().max()) / len(choices) if len(choices) else 1.0
    spread = (chance * (1 - chance) / max(len(hits), 1)) ** 0.5
    return float(hits.float().mean()) <= chance + standard_errors * spread


def read_states(target: Any, layers: tuple[int, ...], ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the target's greedy token after each position, and its hidden states there."""
    target.keep_hidden(layers)
    hidden = target.allocate_hidden(len(ids))
    logits = target.forward(whole_text(ids), fresh_kv(target, len(ids)), hidden)
    assert hidden is not None
    return logits.argmax(-1), hidden


def fresh_kv(model: Any, tokens: int) -> KVCache:
    blocks = -(-tokens // _BLOCK_TOKENS)
    sizes = blocks, _BLOCK_TOKENS
    return KVCache(model.config, *sizes, model.dtype, model.device, num_pages=blocks)


def whole_text(ids: Tensor) -> RaggedBatch:
    """Return a batch of one whole sequence, with logits of all positions."""
    count = len(ids)
    lens = np.array([count], dtype=np.int32)
    tables, positions = np.arange(-(-count // _BLOCK_TOKENS), dtype=np.int32)[None], iota(count)
    rows, slots = torch.from_numpy(positions), np.zeros(1, np.int32)
    pages = np.append(np.int32(-1), tables)[None]  # after each block
    return RaggedBatch(ids, rows, lens, lens, tables, rows, pages, slots)
