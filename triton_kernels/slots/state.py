"""The device's state of every sequence, by slot, in one piece of memory.

All fields lie in one arena of 32-bit words, so all changes since the last step come as one message.
It consists of runs: successive words and their destination. Rows of padding use the last slot,
which has no sequence: it is greedy and has nothing to compute.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from triton_kernels.build.jit import jit
from triton_kernels.sampling.inputs import GREEDY, LogitsShaping

_ALIGN_WORDS = 32
BLOCK = 1024
NUM_WARPS = 4
RUN_WORDS = 4096  # most words of a run of `SlotUpdate.put`; one program copies it


class ArenaSizes(NamedTuple):
    """Sizes: `slots` counts the padding slot, too; the others are per slot."""

    slots: int
    tokens: int
    blocks: int
    vocab: int
    listed: int  # entries in the list of tokens whose logits are shaped
    drafts: int = 0  # further entries for the drafts of a step
    guess: int = 0  # words of a lookup's drafts from the host
    boundaries: int = 0  # block boundaries with a state of recurrent layers

    @property
    def fields(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The dtype of each field, and its shape for one slot."""
        i32, i64, f32 = torch.int32, torch.int64, torch.float32
        scalars = ("num_tokens", "kv_len", "draft_kv_len", "max_total", "failed", "modes", "top_k")
        entries = (self.listed + self.drafts,)
        lists = {name: (i32, entries) for name in ("listed", "counts", "marks")}
        return {
            **{name: (i32, ()) for name in (*scalars, "num_listed", "min_tokens")},
            **{name: (f32, ()) for name in ("temperatures", "top_p", "min_p")},
            **lists,
            "bias": (f32, entries),
            "plain": (i32, (-(-self.vocab // 32),)),
            "penalties": (f32, (3,)),
            "keys": (i64, (2,)),
            "choices": (i64, ()),
            "tokens": (i32, (self.tokens,)),
            "blocks": (i32, (self.blocks,)),
            "guess": (i32, (self.guess,)),
            "pages": (i32, (self.boundaries,)),
        }

    @property
    def num_words(self) -> int:
        """The number of words of all fields and of `work`, without padding for alignment."""
        words = sum(math.prod(shape) * dtype.itemsize // 4 for dtype, shape in self.fields.values())
        return self.slots * (words + len(SlotWork._fields))


class SlotWork(NamedTuple):
    """The work that a plan gives a slot. The values are row numbers in the field `work`, which is
    [6, slots] and zero for slots without work."""

    num_new_tokens: int = 0  # known tokens to compute: a chunk, or the last one; 0 means no row
    num_drafts: int = 1
    catch_up: int = 2  # tokens for the draft model beyond the last known one
    wants_logits: int = 3
    drafting: int = 4  # equal in all slots: 1 if any slot drafts or catches up in this step
    looked_up: int = 5  # drafts from a lookup on the host, instead of the model's


NEW_TOKENS, NUM_DRAFTS, CATCH_UP, WANTS, DRAFTING, LOOKED_UP = map(tl.constexpr, SlotWork())


class SlotState(NamedTuple):
    """Views of the arena, [slots] or [slots, n]. A slot has `num_tokens` known tokens; the drafts
    of the current step are stored after them. `kv_len` and `draft_kv_len` count valid KV
    positions."""

    tokens: Tensor  # int32 [slots, n]
    blocks: Tensor  # int32 [slots, n], block ids by absolute block index
    num_tokens: Tensor  # int32, as the next four
    kv_len: Tensor
    draft_kv_len: Tensor
    max_total: Tensor
    failed: Tensor  # 1: its logits were not finite; it computes nothing more
    modes: Tensor  # this and the next fields: see `sampling.inputs`
    temperatures: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    keys: Tensor
    choices: Tensor
    plain: Tensor
    listed: Tensor
    num_listed: Tensor
    bias: Tensor
    counts: Tensor
    marks: Tensor
    penalties: Tensor
    min_tokens: Tensor
    guess: Tensor  # int32 [slots, n], see `guesses`
    pages: Tensor  # int32 [slots, n], the state page of each block boundary, or -1
    work: Tensor  # int32 [6, slots], see `SlotWork`

    @property
    def shaping(self) -> LogitsShaping:
        return LogitsShaping(*(getattr(self, name) for name in LogitsShaping._fields))


class FieldPlace(NamedTuple):
    """The place of a field, in words: slot s has it at `offset + s * stride`."""

    offset: int
    stride: int


class Arena(NamedTuple):
    words: Tensor  # int32, the whole arena
    state: SlotState
    places: dict[str, FieldPlace]

    @classmethod
    def allocate(cls, sizes: ArenaSizes, device: torch.device | str) -> Arena:
        """Allocate zeros, with parameters that shape no logits."""
        places, shapes, used = {}, {}, 0
        num_work_fields = len(SlotWork._fields)
        for name, (dtype, shape) in sizes.fields.items():
            width = math.prod(shape) * dtype.itemsize // 4
            places[name], shapes[name] = FieldPlace(used, width), (dtype, (sizes.slots, *shape))
            used += _aligned(sizes.slots * width)
        # [6, slots], unlike the other fields: a plan sends this field as a whole.
        places["work"], shapes["work"] = (
            FieldPlace(used, num_work_fields),
            (torch.int32, (num_work_fields, sizes.slots)),
        )
        used += _aligned(sizes.slots * num_work_fields)
        words = torch.zeros(used, dtype=torch.int32, device=device)
        views = {
            name: words[place.offset : place.offset + sizes.slots * place.stride]
            .view(shapes[name][0])
            .view(shapes[name][1])
            for name, place in places.items()
        }
        state = SlotState(**views)
        state.plain.fill_(-1)
        state.penalties[:, 0] = 1.0
        state.temperatures.fill_(1.0)
        state.modes.fill_(GREEDY)
        return cls(words, state, places)


def _aligned(words: int) -> int:
    return -(-words // _ALIGN_WORDS) * _ALIGN_WORDS


@jit(do_not_specialize=["first_run"])
def apply_kernel(inbox_ptr, words_ptr, first_run, BLOCK: tl.constexpr):
    """Copy a run, which is (destination, place in the inbox, length)."""
    run_ptr = inbox_ptr + 3 * (first_run + tl.program_id(0))
    to, source, length = tl.load(run_ptr), tl.load(run_ptr + 1), tl.load(run_ptr + 2)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        words = tl.load(inbox_ptr + source + at, mask=at < length, other=0)
        tl.store(words_ptr + to.to(tl.int64) + at, words, mask=at < length)


def apply(inbox: Tensor, words: Tensor, first_run: int, num_runs: int) -> None:
    """Copy `num_runs` runs of `inbox` int32 [n], from number `first_run` on, to `words` int32 [m].
    Their destinations must not overlap. Raises ValueError naming the argument that does not fit."""
    for name, tensor in (("inbox", inbox), ("words", words)):
        if tensor.dtype != torch.int32 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)}; give int32 [n]")
    if 3 * (first_run + num_runs) > len(inbox):
        raise ValueError(f"inbox: {len(inbox)} words do not hold {first_run + num_runs} runs")
    if num_runs:
        apply_kernel[(num_runs,)](
            inbox, words, first_run, BLOCK=BLOCK, num_warps=NUM_WARPS, num_stages=1,
            enable_fp_fusion=True,
        )  # fmt: skip
