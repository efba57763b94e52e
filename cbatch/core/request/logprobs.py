"""Log probabilities of one position, as a step reports them."""

from __future__ import annotations

import msgspec
import numpy as np


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of T successive tokens of one sequence, and of the n likeliest in the place
    of each, in the order (-logprob, id). Minus infinity: the token could not be chosen."""

    slot: int
    first_position: int  # absolute, of the first token
    chosen: np.ndarray  # float32 [T]
    top_ids: np.ndarray  # int32 [T, n]
    top: np.ndarray  # float32 [T, n]
