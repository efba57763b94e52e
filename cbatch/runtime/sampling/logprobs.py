"""Log probabilities of tokens, for the requests that want them.

Each row of logits is normalised by itself. So a token's values have the same bits whether it was an
accepted draft, a bonus token or the only token of a plain step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.core.request.logprobs import TokenLogprobs
from cbatch.core.scheduler.plan import NewSequence
from cbatch.runtime.model.arrays import I64


class LogprobRequest(NamedTuple):
    num_top: int  # 0: only the chosen token
    processed: bool  # True: after processors and filters; False: the model's own distribution


class LogprobRequests:
    """The log probabilities that each slot needs, by slot. A slot is in `prompts` until its prompt
    is computed."""

    def __init__(self) -> None:
        self.outputs: dict[int, LogprobRequest] = {}
        self.prompts: dict[int, LogprobRequest] = {}

    def admit(self, a: NewSequence) -> None:
        """Note the requests. Raises ValueError if prompt positions that need logprobs are in KV."""
        params = a.params
        if params.logprobs is not None:
            self.outputs[a.slot] = LogprobRequest(
                params.logprobs, params.logprobs_mode == "processed"
            )
        if a.computes_prompt:
            assert params.prompt_logprobs is not None
            if a.kv_len_tokens:
                raise ValueError(
                    f"admission of {a.request_id!r}: {a.kv_len_tokens} tokens are in KV, but "
                    "the log probabilities of its prompt are requested"
                )
            self.prompts[a.slot] = LogprobRequest(params.prompt_logprobs, processed=False)

    def release(self, slot: int) -> None:
        self.outputs.pop(slot, None)
        self.prompts.pop(slot, None)


def describe(
    slot: int, first_position: int, logits: Tensor, tokens: I64, num_top: int
) -> TokenLogprobs:
    """Return the log probabilities of `tokens` int64 [T], chosen at successive positions. `logits`
    fp32 [T, V] may differ from the model's by a constant in each row."""
    packed = pack(logits, torch.from_numpy(tokens).to(logits.device), num_top)
    return unpack(slot, first_position, packed.cpu().numpy())


def pack(logits: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    """Compute what `unpack` reads, int32 [T, 1 + 2 n], on the device of `logits` fp32 [T, V] and
    `tokens` int64 [T], without synchronising. n is min(`num_top`, V)."""
    logprobs = logits.log_softmax(dim=-1).nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
    chosen = logprobs.gather(1, tokens[:, None])
    top_ids = _top(logprobs, min(num_top, logits.shape[1]))
    values = torch.cat((chosen, logprobs.gather(1, top_ids)), dim=1)
    return torch.cat((values.view(torch.int32), top_ids.to(torch.int32)), dim=1)


def unpack(slot: int, first_position: int, packed: NDArray[np.int32]) -> TokenLogprobs:
    num_top = packed.shape[1] // 2
    values = packed[:, : 1 + num_top].copy().view(np.float32)
    return TokenLogprobs(
        slot=slot,
        first_position=first_position,
        chosen=values[:, 0],
        top_ids=packed[:, 1 + num_top :].copy(),
        top=values[:, 1:],
    )


def _top(logprobs: Tensor, count: int) -> Tensor:
    """Return the `count` likeliest tokens of each row in the order (-logprob, id), int64
    [T, count]. Sorts distinct integers that have this order."""
    bits = (logprobs + 0.0).view(torch.int32)  # -0.0 becomes 0.0: equal values, equal bits
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    last = logprobs.shape[1] - 1
    ids = torch.arange(last + 1, device=logprobs.device)
    best: Tensor = ((order.long() << 32) + (last - ids)).topk(count, dim=-1).values
    return last - (best & 0xFFFFFFFF)


def split_prompt_rows(
    logits: Tensor, ends: I64, counts: Sequence[tuple[int, int]], num_rows: I64
) -> tuple[list[Tensor], Tensor]:
    """Return the first `n` rows of sequence i, for each (i, n) of `counts`, and all other rows.

    The rows of sequence i are `logits[ends[i] - num_rows[i] : ends[i]]`."""
    others = np.ones(len(logits), dtype=np.bool_)
    parts = []
    for i, count in counts:
        start = int(ends[i] - num_rows[i])
        others[start : start + count] = False
        parts.append(logits[start : start + count])
    return parts, logits[torch.from_numpy(others.nonzero()[0]).to(logits.device)]
