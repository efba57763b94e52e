"""The input of a forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

PASS_ERRORS = {  # by the status of a pass that is refused
    1: "tokens: an id is not in the vocabulary",
    2: "block_tables: too short for the context, or with a block that is not in the cache",
    3: "logits_index: a row that is not in the batch",
    4: "state_tables: without the page of a boundary, or with a page or slot that is not there",
}


@dataclass
class RaggedBatch:
    """Tokens (rows) of B sequences, concatenated. Each sequence may have any number of rows.

    tokens, positions: int64 [T]. query_lens, context_lens: int32 [B]; the last row of sequence b
    has the position `context_lens[b] - 1`. block_tables: int32 [B, blocks], block ids by absolute
    block index (entries beyond the context are not read). logits_index: int64 [N], the rows whose
    logits are computed. After the pass, K and V of all `context_lens[b]` positions are in the
    cache.

    state_tables: int32 [B, boundaries + 1], for models with recurrent layers: entry j is the page
    for their state after j blocks; -1: none. The pass reads the entry of the last boundary at or
    before its first position, unless that is 0: then the state is zero. It writes each later entry
    that its tokens reach. Other entries may be outdated. state_slots: int32 [B], the slot of each
    sequence, which keeps what its tokens since a boundary add to the state.
    """

    tokens: Tensor
    positions: Tensor
    query_lens: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    logits_index: Tensor
    state_tables: NDArray[np.int32] | None = None
    state_slots: NDArray[np.int32] | None = None
