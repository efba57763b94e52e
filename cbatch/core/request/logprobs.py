"""Log probabilities of tokens, as a step reports them."""

from __future__ import annotations

import msgspec
import numpy as np


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of T successive tokens of one sequence, and of the n likeliest tokens at
    each of their positions, in the order (-logprob, id). Minus infinity marks a token that could
    not be sampled."""

    slot: int
    first_position: int  # position of the first of the T tokens; a prompt begins at 0
    chosen: np.ndarray  # float32 [T]
    top_ids: np.ndarray  # int32 [T, n]
    top: np.ndarray  # float32 [T, n]
