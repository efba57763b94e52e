"""From logits to tokens: the greedy choice, bans, and the filtered distribution of sampled rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.rows import I64, SlotTable
from triton_kernels.verify import NoiseRows


class Filters(NamedTuple):
    """Sampling parameters of N logits rows. None: no row uses that filter."""

    temperature: Tensor  # fp32 [N], > 0
    top_k: Tensor | None  # int64 [N]; the vocabulary size where a row has none
    top_p: Tensor | None  # fp32 [N]; infinite where a row has none
    min_p: Tensor | None  # fp32 [N]

    def select(self, index: Tensor) -> Filters:
        return Filters(*(None if field is None else field[index] for field in self))


def filters_of(table: SlotTable, slots: I64, device: torch.device) -> Filters:
    """The filters of `slots`, in that order."""

    def load(values: NDArray[np.generic], used: bool) -> Tensor | None:
        return torch.from_numpy(values).to(device) if used else None

    top_k, top_p, min_p = table.top_k[slots], table.top_p[slots], table.min_p[slots]
    return Filters(
        torch.from_numpy(table.temperature[slots]).to(device),
        load(top_k, bool((top_k < table.vocab_size).any())),
        load(top_p, bool((top_p <= 1).any())),
        load(min_p, bool((min_p > 0).any())),
    )


def noise_rows(table: SlotTable, slots: I64, positions: I64, device: torch.device) -> NoiseRows:
    """Where the rows in `slots` draw the noise of the tokens at `positions`."""
    return NoiseRows(
        torch.from_numpy(table.keys[slots]).to(device),
        torch.from_numpy(table.choice[slots]).to(device),
        torch.from_numpy(positions).to(device),
    )


def filtered_probs(logits: Tensor, filters: Filters) -> Tensor:
    """The distribution a request asks for: fp32 [N, V] from fp32 logits [N, V].

    Temperature, then top-k, then top-p of what top-k left (renormalised), then min-p relative to
    the most likely token. Edges are cut in the order (-logit, id), so a tie goes to the lowest id.
    Every operation is on one row alone.
    """
    # The maximum goes first: a tiny temperature then overflows to -inf at most, never to NaN.
    x = (logits - logits.amax(dim=-1, keepdim=True)) / filters.temperature[:, None]
    if filters.top_k is not None or filters.top_p is not None:
        ordered, order = x.sort(dim=-1, descending=True, stable=True)
        if filters.top_k is not None:
            rank = torch.arange(x.shape[-1], device=x.device)
            ordered = ordered.masked_fill(rank >= filters.top_k[:, None], -torch.inf)
        if filters.top_p is not None:
            p = ordered.softmax(dim=-1)
            before = p.cumsum(dim=-1) - p
            before[:, 0] = 0  # the most likely token always stays
            ordered = ordered.masked_fill(before >= filters.top_p[:, None], -torch.inf)
        x = torch.empty_like(x).scatter_(-1, order, ordered)
    if filters.min_p is not None:
        x = x.masked_fill(x < filters.min_p.log()[:, None], -torch.inf)
    return x.softmax(dim=-1)


def greedy_choice(logits: Tensor) -> tuple[I64, NDArray[np.bool_]]:
    """Most likely token (ties to the lowest id) and "all finite" of each row, on the host.

    One transfer from a device; on the CPU numpy views, whose row reductions are the fastest here.
    """
    if logits.device.type == "cpu":
        x = logits.numpy()
        ids = x.argmax(axis=1)
        # NaN is its own maximum; an infinity shows in the maximum or in the minimum.
        return ids, np.isfinite(x[np.arange(len(ids)), ids] + x.min(axis=1))
    low, high = logits.aminmax(dim=1)
    both = torch.stack((logits.argmax(dim=1), torch.isfinite(low + high).to(torch.int64)))
    host = both.cpu().numpy()
    return host[0], host[1].astype(bool)


def ban_stop_ids(
    logits: Tensor, table: SlotTable, slots: I64, positions: I64, row_starts: I64, row_lens: I64
) -> None:
    """Set the stop ids of rows short of min_tokens to -inf, in place.

    Row i owns `logits[row_starts[i] : row_starts[i] + row_lens[i]]`, which decide the positions
    from `positions[i]` on; only those before `first_stop` are touched.
    """
    for i in np.flatnonzero(positions < table.first_stop[slots]):
        banned = int(min(row_lens[i], table.first_stop[slots[i]] - positions[i]))
        ids = table.stop_ids[slots[i]]
        columns = torch.from_numpy(ids[ids < logits.shape[1]]).to(logits.device)
        start = int(row_starts[i])
        logits[start : start + banned].index_fill_(1, columns, -torch.inf)
