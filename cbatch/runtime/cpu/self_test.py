"""How often a head agrees with its target, on text at hand: what a layout leaves open is decided by
that, and a head that guesses at random is found out before it is served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cbatch.runtime.cpu.decoder import Model, RaggedBatch
from cbatch.runtime.cpu.head import Head
from cbatch.runtime.model.kv_cache import KVCache

_BLOCK_TOKENS = 16


class Tested(NamedTuple):
    """Of first drafts on a text, which are the target's own choice (bool `hits` [trials]).
    `chance`: as many as one token would be right that is always guessed."""

    head: Head
    hits: Tensor
    chance: float

    @property
    def trials(self) -> int:
        return len(self.hits)

    @property
    def agreement(self) -> float:
        return float(self.hits.float().mean())

    def beats(self, other: Tested) -> bool:
        """By more than two standard errors of what tells them apart."""
        wins, losses = int((self.hits & ~other.hits).sum()), int((other.hits & ~self.hits).sum())
        return wins - losses > 2 * (wins + losses) ** 0.5

    @property
    def guesses(self) -> bool:
        """Whether it is no better than that: within two standard errors."""
        spread = (self.chance * (1 - self.chance) / self.trials) ** 0.5
        return self.agreement <= self.chance + 2 * spread


@torch.inference_mode()
def best_reading(heads: Sequence[Head], target: Model, texts: Sequence[Sequence[int]]) -> Tested:
    """The likeliest reading, unless another agrees more beyond doubt. `texts` are token ids."""
    kept = target.hidden_layers
    try:
        tested = [_test(head, target, texts) for head in heads]
    finally:
        target.keep_hidden(kept)
    best = tested[0]
    for other in tested[1:]:
        if other.beats(best):
            best = other
    return best


def _test(head: Head, target: Model, texts: Sequence[Sequence[int]]) -> Tested:
    hits, choices = [], []
    for tokens in texts:
        ids = torch.tensor(tokens, dtype=torch.int64)
        chosen, hidden = _read(target, head.head.hidden_layers, ids)
        drafts = head.first_logits(_whole(ids), _kv(head, len(ids)), hidden).argmax(-1)
        hits.append((drafts == chosen)[1:])
        choices.append(chosen[1:])
    hit, every = torch.cat(hits), torch.cat(choices)
    chance = float(every.bincount().max()) / len(every)
    return Tested(head, hit, chance)


def _read(target: Model, layers: tuple[int, ...], ids: Tensor) -> tuple[Tensor, Tensor]:
    """The target's choice behind each position, and its states there."""
    target.keep_hidden(layers)
    hidden = target.room_for_hidden(len(ids))
    logits = target.forward(_whole(ids), _kv(target, len(ids)), hidden)
    assert hidden is not None
    return logits.argmax(-1), hidden


def _kv(model: Model | Head, tokens: int) -> KVCache:
    blocks = -(-tokens // _BLOCK_TOKENS)
    return KVCache(model.config, blocks, _BLOCK_TOKENS, model.dtype, model.device)


def _whole(ids: Tensor) -> RaggedBatch:
    """A sequence at once, of which all is wanted."""
    count = len(ids)
    lens = np.array([count], dtype=np.int32)
    tables = np.arange(-(-count // _BLOCK_TOKENS), dtype=np.int32)[None]
    return RaggedBatch(ids, torch.arange(count), lens, lens, tables, torch.arange(count))
