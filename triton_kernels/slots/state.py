"""What a device knows of every sequence, by slot, in one piece of memory.

All fields lie in one arena of 32-bit words, so that whatever changed since the last step comes as
one message of runs: words, and where they go. The last slot is never filled. It stands for rows of
padding: greedy, nothing to compute.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from triton_kernels.build.case import CaseLimits, KernelCase, case_of
from triton_kernels.build.jit import jit
from triton_kernels.sampling.inputs import GREEDY, LogitsShaping

_ALIGN_WORDS = 32
_BLOCK = 1024
_NUM_WARPS = 4
RUN_WORDS = 4096  # the longest run: one program copies it
LIMITS = CaseLimits(registers=128, shared_bytes=4 << 10)


class ArenaSizes(NamedTuple):
    """`slots` with the one for padding; the others per slot."""

    slots: int
    tokens: int
    blocks: int
    vocab: int
    listed: int  # entries of the list that shapes logits
    drafts: int = 0  # and room behind them for the drafts of a step
    guess: int = 0  # words of what the host looked up for the slot

    @property
    def fields(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type of every field, and its shape for one slot."""
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
        }

    @property
    def num_words(self) -> int:
        """Of all fields, and of what a plan asks; without what aligns them."""
        words = sum(math.prod(shape) * dtype.itemsize // 4 for dtype, shape in self.fields.values())
        return self.slots * (words + len(Asked._fields))


class Asked(NamedTuple):
    """What the plan of a step asks of a slot. Where they lie in the field `asked`, which is
    [6, slots], and zero for slots without a row."""

    num_new_tokens: int = 0  # known tokens to compute: a chunk, or the last one; 0: no row
    num_drafts: int = 1
    catch_up: int = 2  # tokens for the draft model beyond the last known one
    wants_logits: int = 3
    drafting: int = 4  # for all slots alike: whether anybody drafts or catches up in this step
    looked_up: int = 5  # drafts that the host looked up, in place of those of the model


NEW_TOKENS, NUM_DRAFTS, CATCH_UP, WANTS, DRAFTING, LOOKED_UP = map(tl.constexpr, Asked())


class SlotState(NamedTuple):
    """Views of the arena, [slots] or [slots, n]. A slot knows `num_tokens` tokens; drafts of the
    step in progress lie behind them. `kv_len` and `draft_kv_len` count valid KV positions."""

    tokens: Tensor  # int32 [slots, n]
    blocks: Tensor  # int32 [slots, n], block ids by absolute block index
    num_tokens: Tensor  # int32, as the next four
    kv_len: Tensor
    draft_kv_len: Tensor
    max_total: Tensor
    failed: Tensor  # 1: its logits were not finite; it computes nothing more
    modes: Tensor  # the others: see `sample.rows`
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
    asked: Tensor  # int32 [6, slots], see `Asked`

    @property
    def shaping(self) -> LogitsShaping:
        return LogitsShaping(*(getattr(self, name) for name in LogitsShaping._fields))


_FLOATS = dict.fromkeys(("temperatures", "top_p", "min_p", "bias", "penalties"), "*fp32")
STATE_TYPES = SlotState(*["*i32"] * len(SlotState._fields))._replace(
    **_FLOATS, keys="*i64", choices="*i64"
)


class FieldPlace(NamedTuple):
    """Where a field lies, in words: that of slot s from `offset + s * stride` on."""

    offset: int
    stride: int


class Arena(NamedTuple):
    words: Tensor  # int32, all of it
    state: SlotState
    places: dict[str, FieldPlace]

    @classmethod
    def allocate(cls, sizes: ArenaSizes, device: torch.device | str) -> Arena:
        """Zeros, and nothing shapes any logits."""
        places, shapes, used = {}, {}, 0
        asked = len(Asked._fields)
        for name, (dtype, shape) in sizes.fields.items():
            width = math.prod(shape) * dtype.itemsize // 4
            places[name], shapes[name] = FieldPlace(used, width), (dtype, (sizes.slots, *shape))
            used += _aligned(sizes.slots * width)
        # By field, then by slot: it comes as a whole with every plan.
        places["asked"], shapes["asked"] = (
            FieldPlace(used, asked),
            (torch.int32, (asked, sizes.slots)),
        )
        used += _aligned(sizes.slots * asked)
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
    """A run is (where it goes, where it lies in the inbox, length)."""
    run_ptr = inbox_ptr + 3 * (first_run + tl.program_id(0))
    to, source, length = tl.load(run_ptr), tl.load(run_ptr + 1), tl.load(run_ptr + 2)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        words = tl.load(inbox_ptr + source + at, mask=at < length, other=0)
        tl.store(words_ptr + to.to(tl.int64) + at, words, mask=at < length)


def apply(inbox: Tensor, words: Tensor, first_run: int, num_runs: int) -> None:
    """Copy the runs `first_run` .. of `inbox` int32 [n] to `words` int32 [m]; no two of them may
    overlap. Raises ValueError naming the argument that does not fit."""
    for name, tensor in (("inbox", inbox), ("words", words)):
        if tensor.dtype != torch.int32 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)}; give int32 [n]")
    if 3 * (first_run + num_runs) > len(inbox):
        raise ValueError(f"inbox: {len(inbox)} words do not hold {first_run + num_runs} runs")
    if num_runs:
        apply_kernel[(num_runs,)](
            inbox, words, first_run, BLOCK=_BLOCK, num_warps=_NUM_WARPS, num_stages=1,
            enable_fp_fusion=True,
        )  # fmt: skip


def cases() -> list[KernelCase]:
    block = {"BLOCK": _BLOCK}
    return [
        case_of("slots_apply", f"block={_BLOCK}", apply_kernel, block, LIMITS, num_warps=_NUM_WARPS)
    ]
