"""Work items of the attention kernel, planned on the device from a step's query and context
lengths.

The tokens of a sequence are cut into blocks that fill a tile with (token, head) rows, and its keys
into splits at multiples of `split_tokens`. A block is either *whole* (one item) or *split* (one
item for each of its parts). The program that finishes last folds the parts' partial results.

- Fixed parts: softmax is computed for each split on its own, and the splits are folded in order,
  also in a whole block. So a row's bits depend neither on the batch nor on the assignment of
  work. A part is one split. Short queries are split while memory for partial results lasts.
- Balanced parts: parts are as long as needed to give each program about one. An item is one running
  softmax over its keys, so a row's bits depend on the load of the step.

Without memory for partial results a block stays whole: slower, but just as correct. Items are
ordered roughly longest first. Their number stays on the device: nothing waits for the host, and a
captured graph serves any mix of queries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.attention.kernel import (
    FIRST_SPLIT,
    ITEM_FIELDS,
    PART,
    PARTS,
    POSITION,
    ROW,
    SEQUENCE,
    SLOT,
    STOP_SPLIT,
    TOKENS,
)
from triton_kernels.build.check import check_tensor
from triton_kernels.build.jit import jit

_MAX_BLOCKS_TO_SPLIT = 8  # queries of more blocks are not split: they fill the device anyway
_ANY = (1 << 30) - 1  # no limit: larger than any token or block count
_LANES = 128
# Arguments that must not specialise the planning kernel: one compilation serves every work list.
_NUMBERS = ("most_partials", "num_sequences", "least_query", "most_query", "block_tokens", "split",
            "window", "programs", "most_blocks")  # fmt: skip


class Tile(NamedTuple):
    """Tile of one program: `rows` (token, head) by `keys`, powers of two of at least 16."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    programs: int = 1  # programs that share a multiprocessor, which bounds their registers
    descriptors: bool = False  # load K and V by TMA; page_tokens must be a multiple of keys

    @property
    def max_registers(self) -> int:
        """Registers per thread with `programs` programs on an NVIDIA multiprocessor. It has 65536,
        allocated in units of eight."""
        return min(65536 // (32 * self.num_warps * self.programs) // 8 * 8, 255)


class Heads(NamedTuple):
    kv_heads: int
    group: int  # query heads of each KV head
    head_dim: int


class Partials(NamedTuple):
    """Memory for partial results, shared by all layers.

    sums fp32 [P, kv_heads, rows, head_dim]; stats fp32 [P, kv_heads, 2 (maximum, sum), rows];
    arrived int32 [P, kv_heads]: finished parts of a block; zero between launches.
    """

    sums: Tensor
    stats: Tensor
    arrived: Tensor

    @classmethod
    def allocate(cls, count: int, heads: Heads, tile: Tile, device: torch.device | str) -> Partials:
        """Allocate memory for `count` >= 1 partial results (block, part)."""
        shape = (count, heads.kv_heads)
        return cls(
            torch.empty(*shape, tile.rows, heads.head_dim, device=device),
            torch.empty(*shape, 2, tile.rows, device=device),
            torch.zeros(shape, dtype=torch.int32, device=device),
        )


class WorkList(NamedTuple):
    """Work items of a step for layers with one window, filled by `plan` for the kernel."""

    items: Tensor  # int32 [capacity, ITEM_FIELDS]
    num_items: Tensor  # int32 [1]
    heads: Heads
    tile: Tile
    split_tokens: int
    balanced: int | None  # programs to balance parts over; None: fixed parts
    queries: tuple[int, int]  # least and most tokens of a query; others get no items
    window: int | None  # in tokens, the token itself included
    partials: Partials
    most_tokens: int
    most_sequences: int

    @classmethod
    def allocate(
        cls,
        partials: Partials,
        heads: Heads,
        tile: Tile,
        *,
        most_tokens: int,
        most_sequences: int,
        split_tokens: int,
        balanced: int | None = None,
        queries: tuple[int, int] = (1, _ANY),
        window: int | None = None,
    ) -> WorkList:
        """Allocate memory for steps of up to `most_tokens` tokens in `most_sequences` sequences.
        Raises ValueError for `split_tokens` or `partials` that do not fit the tile."""
        tokens = block_tokens(heads, tile)
        if split_tokens % tile.keys:
            raise ValueError(f"split_tokens: give a multiple of the tile's {tile.keys} keys")
        if partials.sums.shape[1:] != (heads.kv_heads, tile.rows, heads.head_dim):
            raise ValueError("partials: allocate them for the same heads and tile")
        capacity = len(partials.arrived) + most_sequences + -(-most_tokens // tokens)
        device = partials.sums.device
        items = torch.zeros(capacity, ITEM_FIELDS.value, dtype=torch.int32, device=device)
        num_items = torch.zeros(1, dtype=torch.int32, device=device)
        return cls(
            items,
            num_items,
            heads,
            tile,
            split_tokens,
            balanced,
            queries,
            window,
            partials,
            most_tokens,
            most_sequences,
        )


def block_tokens(heads: Heads, tile: Tile) -> int:
    """Return the query tokens in a tile. Raises ValueError if a group does not fit it."""
    tokens = tile.rows // heads.group
    if tokens < 1:
        raise ValueError(f"tile.rows: {tile.rows} cannot hold a group of {heads.group} heads")
    return tokens


def balanced_partials(programs: int, heads: Heads) -> int:
    """Return the most partial results of a step balanced over `programs` programs. A block is split
    if it has work for 1.5 programs or more. Parts are rounded, and the worst case is 2 parts for
    1.5 programs."""
    return -(-4 * programs // (3 * heads.kv_heads)) + 1


def plan(query_starts: Tensor, context_lens: Tensor, work: WorkList) -> None:
    """Fill `work` for a step.

    query_starts int32 [B + 1]: flat row of each sequence's first token, then the total; sequences
    without tokens are allowed. context_lens int32 [B]: the position of a sequence's last token,
    plus 1. Raises ValueError naming the argument that does not fit.
    """
    count = len(context_lens)
    check_tensor("context_lens", context_lens, torch.int32, (count,))
    check_tensor("query_starts", query_starts, torch.int32, (count + 1,))
    if count > work.most_sequences:
        raise ValueError(
            f"context_lens: {count} sequences, the work list holds {work.most_sequences}"
        )
    balanced = work.balanced is not None
    plan_kernel[(count,)](
        query_starts, context_lens, work.items, work.num_items, len(work.partials.arrived), count,
        *work.queries, block_tokens(work.heads, work.tile), work.split_tokens, work.window or _ANY,
        max(1, (work.balanced or 0) // work.heads.kv_heads),
        _ANY if balanced else _MAX_BLOCKS_TO_SPLIT, BALANCED=balanced,
        BLOCK_SEQUENCES=max(16, triton.next_power_of_2(count)), LANES=_LANES, num_warps=4,
        num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip


@jit
def _first_split(position, split, window):
    """Return the split with the first key that a token at `position` sees."""
    return tl.maximum(position - window + 1, 0) // split


@jit(do_not_specialize=_NUMBERS)
def plan_kernel(
    query_starts_ptr, context_lens_ptr, items_ptr, num_items_ptr, most_partials, num_sequences,
    least_query, most_query, block_tokens, split, window, programs, most_blocks,
    BALANCED: tl.constexpr, BLOCK_SEQUENCES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the items of one sequence per program. Every program computes the item counts of all
    sequences, to find where its own items start.

    The list has three sections: whole blocks of several splits; all parts but the last of each
    split block; the last parts, and blocks of a single split.
    """
    this = tl.program_id(0)
    sequences = tl.arange(0, BLOCK_SEQUENCES)
    in_range = sequences < num_sequences
    starts = tl.load(query_starts_ptr + sequences, mask=in_range, other=0)
    queries = tl.load(query_starts_ptr + sequences + 1, mask=in_range, other=0) - starts
    contexts = tl.load(context_lens_ptr + sequences, mask=in_range, other=0)
    served = (queries >= least_query) & (queries <= most_query)
    blocks = tl.where(served, (queries + block_tokens - 1) // block_tokens, 0)
    first_splits = _first_split(contexts - queries, split, window)
    splits = (contexts + split - 1) // split - first_splits
    parts = splits
    if BALANCED:
        share = tl.maximum((tl.sum(blocks * splits, 0) + programs - 1) // programs, 1)
        parts = (2 * splits + share) // (2 * share)
    num_parts = tl.where((parts > 1) & (blocks <= most_blocks), blocks * parts, 0)
    ends = tl.cumsum(num_parts, 0)
    is_split = (num_parts > 0) & (ends <= most_partials)
    whole_blocks = tl.where((splits > 1) & (is_split == 0), blocks, 0)
    front_parts = tl.where(is_split, blocks * (parts - 1), 0)
    last_parts = blocks - whole_blocks
    total_whole, total_front = tl.sum(whole_blocks, 0), tl.sum(front_parts, 0)
    if this == 0:
        tl.store(num_items_ptr, total_whole + total_front + tl.sum(last_parts, 0))

    before, is_this = sequences < this, sequences == this
    places = (
        tl.sum(tl.where(before, whole_blocks, 0), 0),
        total_whole + tl.sum(tl.where(before, front_parts, 0), 0),
        total_whole + total_front + tl.sum(tl.where(before, last_parts, 0), 0),
        tl.sum(tl.where(is_this, ends - num_parts, 0), 0),
    )
    query = tl.sum(tl.where(is_this, queries, 0), 0)
    sequence = (
        this,
        tl.sum(tl.where(is_this, starts, 0), 0),
        query,
        tl.sum(tl.where(is_this, contexts, 0), 0) - query,
        tl.sum(tl.where(is_this, blocks, 0), 0),
        tl.sum(tl.where(is_this, splits, 0), 0),
        tl.sum(tl.where(is_this, first_splits, 0), 0),
        tl.maximum(tl.sum(tl.where(is_this & is_split, parts, 0), 0), 1),
    )
    _write_items(items_ptr, sequence, places, block_tokens, split, window, LANES)


@jit
def _write_items(items_ptr, of_sequence, places, block_tokens, split, window, LANES: tl.constexpr):
    """Write the items of one sequence. `places`: where its items begin in each of the three
    sections, and its first slot for partial results."""
    sequence, row, query, position, num_blocks, splits, first_split, parts = of_sequence
    at_whole, at_front, at_last, slots = places
    for start in range(0, num_blocks * parts, LANES):
        lane = start + tl.arange(0, LANES)
        block, part = lane // parts, lane % parts
        skipped = block * block_tokens
        tokens = tl.minimum(query - skipped, block_tokens)
        # A whole block skips splits that none of its tokens sees; folding them would change no bit.
        whole_first = _first_split(position + skipped, split, window)
        whole_stop = (position + skipped + tokens + split - 1) // split
        first = tl.where(parts > 1, first_split + part * splits // parts, whole_first)
        stop = tl.where(parts > 1, first_split + (part + 1) * splits // parts, whole_stop)
        # The last whole block sees the most keys, and goes first.
        place = tl.where(splits > 1, at_whole + num_blocks - 1 - block, at_last + block)
        part_place = tl.where(part == parts - 1, at_last + block, at_front + lane - block)
        item = items_ptr + tl.where(parts > 1, part_place, place) * ITEM_FIELDS
        valid = block < num_blocks
        tl.store(item + SEQUENCE, sequence, mask=valid)
        tl.store(item + ROW, row + skipped, mask=valid)
        tl.store(item + TOKENS, tokens, mask=valid)
        tl.store(item + POSITION, position + skipped, mask=valid)
        tl.store(item + FIRST_SPLIT, first, mask=valid)
        tl.store(item + STOP_SPLIT, stop, mask=valid)
        tl.store(item + SLOT, slots + lane, mask=valid)
        tl.store(item + PART, part, mask=valid)
        tl.store(item + PARTS, parts, mask=valid)
