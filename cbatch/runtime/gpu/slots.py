"""The host's record of every slot, and the message that brings the device's slots up to a plan.
Penalties, biases and token restrictions are lists for the sampling kernels."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress
from operator import add
from struct import Struct
from typing import NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from cbatch.core.request.errors import FieldError
from cbatch.core.request.noise import split_seed
from cbatch.core.request.request import Request, SamplingParams
from cbatch.core.scheduler.executor import errors_of_row
from cbatch.core.scheduler.plan import Deltas, NewSequence, StepPlan
from cbatch.runtime.gpu.host_drafts import DraftPlan
from cbatch.runtime.input_batch import NO_PAGE
from triton_kernels.sampling.inputs import COUPLED, GREEDY, IN_PROMPT, IS_STOP, REJECTION
from triton_kernels.slots.state import RUN_WORDS, ArenaSizes, FieldPlace, SlotWork

Words = NDArray[np.int32]


class SlotUpdate:
    """The field `work`, int32 [6, slots], and runs of int32 words for other fields. `write` packs
    the runs in the format that `triton_kernels.slots.state.apply` reads: first those of new
    sequences, then words that may overwrite them."""

    def __init__(self, places: dict[str, FieldPlace], work: Words) -> None:
        self._places, self.work = places, work
        self._runs: list[tuple[int, Words]] = []
        self._words: list[tuple[Words, Words]] = []
        self._scattered: list[tuple[Words, Words]] = []

    def put(self, name: str, slot: int, values: NDArray[np.generic]) -> None:
        """Set the first elements of a slot's field `name`."""
        offset, stride = self._places[name]
        words = np.ascontiguousarray(values).reshape(-1).view(np.int32)
        to = offset + slot * stride
        for start in range(0, len(words), RUN_WORDS):
            self._runs.append((to + start, words[start : start + RUN_WORDS]))

    def put_words(self, to: Words, words: Words) -> None:
        """Set single words of the arena, which are a run each."""
        self._words.append((to, words))

    def scatter(self, name: str, slots: Words, indices: Words, values: Words) -> None:
        """Set single elements; the last of several values for an element wins. Call it at most
        once per message and field."""
        offset, stride = self._places[name]
        to = (offset + slots.astype(np.int64) * stride + indices).astype(np.int32)
        if len(set(to.tolist())) < len(to):
            _, last = np.unique(to[::-1], return_index=True)
            kept = len(to) - 1 - last
            to, values = to[kept], values[kept]
        self._scattered.append((to, values.astype(np.int32, copy=False)))

    def num_runs(self) -> tuple[int, int]:
        """Return the number of runs in each of the two parts, which `apply` writes in order."""
        first = len(self._runs) + sum(len(to) for to, _ in self._words)
        return first, sum(len(to) for to, _ in self._scattered)

    def num_words(self) -> int:
        """Return the number of words that runs copy."""
        return sum(len(values) for _, values in self._runs + self._words + self._scattered)

    def write(self, out: Words, first: int, second: int) -> None:
        """Fill `out`, which begins with places for `first` and `second` runs. Places that the
        message does not need get empty runs."""
        at = 3 * (first + second)
        runs, row = out[:at].reshape(-1, 3), 0
        runs[:] = 0
        for to, words in self._runs:
            runs[row] = to, at, len(words)
            out[at : at + len(words)] = words
            row, at = row + 1, at + len(words)
        for start, parts in ((row, self._words), (first, self._scattered)):
            for to_many, words in parts:
                end = start + len(words)
                runs[start:end, 0], runs[start:end, 2] = to_many, 1
                runs[start:end, 1] = range(at, at + len(words))
                out[at : at + len(words)] = words
                start, at = end, at + len(words)


Flags = NDArray[np.bool_]
# Fields with a value for each slot, by dtype, in the order of `HostSlots._put_values`.
_INTS = ("num_tokens", "kv_len", "draft_kv_len", "max_total", "failed", "modes", "top_k")
_FLOATS = ("temperatures", "top_p", "min_p")
_LONGS = ("keys", "choices")
_VALUES = Struct("=7i3f3q")
_WORK, _ZERO = SlotWork(), np.array(0, dtype=np.int32)


class Bounds(NamedTuple):
    """Upper bounds of a step's sizes, for its launches. Only the device knows the true sizes, which
    depend on the tokens that the previous step accepted."""

    tokens: int
    longest: int  # most tokens of a row
    logits: int  # rows of logits
    shaped: bool  # some row has penalties, biases or token restrictions
    filtered: bool  # some row that is not greedy has top-k, top-p or min-p
    catch_up: int = 0  # tokens of the draft model's first pass
    longest_catch_up: int = 0  # most of these tokens in a row
    draft_rows: int = 0  # rows for which the draft model drafts
    depth: int = 0  # most drafts of a row by the draft model
    drafting: bool = False  # the draft model runs
    looked_up: int = 0  # most drafts of a row from a lookup
    rejection_sampled: bool = False  # some drafts are sampled, and verified by rejection sampling


class HostSlots:
    """The `generation` of each slot's sequence, -1 in a free slot, and how the sequence samples."""

    def __init__(
        self, sizes: ArenaSizes, places: dict[str, FieldPlace], block_size: int = 1
    ) -> None:
        self._sizes, self._places, self._block_size = sizes, places, block_size
        count = sizes.slots
        self._generation = np.full(count, -1, dtype=np.int32)
        self._samples_drafts: Flags = np.zeros(count, dtype=np.bool_)  # verified by rejection
        words = [places[name] for name in (*_INTS, *_FLOATS, *_LONGS)]
        word_places = [(offset + i, stride) for offset, stride in words for i in range(stride)]
        self._words, self._strides = np.array(word_places, dtype=np.int32).T
        self.shaped: Flags = np.zeros(count, dtype=np.bool_)
        self._filtered: Flags = np.zeros(count, dtype=np.bool_)
        # Slots whose lists on the device are not neutral.
        self._has_lists: Flags = np.zeros(count, dtype=np.bool_)
        self.clear()

    def clear(self) -> None:
        self._generation[:] = -1
        self._has_lists[:] = True  # the last message may have been applied in part

    def check(self, request: Request, eos_ids: tuple[int, ...]) -> None:
        """Raise FieldError for a request whose lists of tokens do not fit a slot."""
        p, prompt, sizes = request.params, request.prompt, self._sizes
        if p.structured_outputs is not None:
            p = structs.replace(p, min_tokens=0)  # see `_admit`
        stop_ids = (*(() if p.ignore_eos else eos_ids), *p.stop_token_ids)
        if shapes_logits(p, has_stops=bool(stop_ids)):
            new_tokens = min(p.max_tokens, sizes.tokens - len(prompt))
            check_lists(p, prompt, stop_ids, new_tokens, sizes)

    def update(self, plan: StepPlan, draft_plan: DraftPlan) -> tuple[SlotUpdate, Bounds]:
        """Apply the deltas of `plan`, and return the message for the device. Raises ValueError for
        a plan that does not fit the slots, RowError for a new sequence that cannot be run here."""
        work = np.zeros((len(_WORK), self._sizes.slots), dtype=np.int32)
        message = SlotUpdate(self._places, work)
        deltas = plan.deltas
        if deltas.reset:
            self.clear()
        if len(deltas.released):
            self._generation[deltas.released] = -1
        for admission in deltas.new_sequences:
            with errors_of_row(admission.slot, admission.generation):
                self._admit(admission, message)
        self._append(deltas, message)
        slots = plan.slots.astype(np.intp)  # numpy is several times faster with this index type
        if self._generation[slots].tolist() != plan.generations.tolist():
            raise ValueError(
                f"step {plan.step_id}: slots {slots.tolist()} do not hold the planned generations; "
                "send a plan with `deltas.reset` and the whole state"
            )
        work[_WORK.num_new_tokens][slots] = new = plan.query_lens - plan.num_drafts
        work[_WORK.wants_logits][slots] = plan.wants_logits
        bounds = self._bounds(plan, slots, new, draft_plan)
        if bounds.drafting or bounds.looked_up:
            work[_WORK.num_drafts][slots] = draft_plan.model
            work[_WORK.catch_up][slots] = draft_plan.catch_up
            work[_WORK.drafting] = True
        if bounds.looked_up:
            work[_WORK.looked_up][slots] = draft_plan.looked_up
        for slot, (known, guess) in draft_plan.guesses.items():
            message.put("guess", slot, np.array([len(guess), known, *guess], dtype=np.int32))
        return message, bounds

    def _bounds(
        self, plan: StepPlan, slots: NDArray[np.intp], new: Words, draft_plan: DraftPlan
    ) -> Bounds:
        """Return the bounds of a step with `new` known tokens per row."""
        # Lists, because numpy takes longer to add up so few numbers.
        looked_up = draft_plan.looked_up if draft_plan.guesses else None
        known, model, wants = new.tolist(), draft_plan.model.tolist(), plan.wants_logits.tolist()
        has_drafts = draft_plan.model > _ZERO
        first_pass = (draft_plan.catch_up + has_drafts).tolist()
        drafts = model if looked_up is None else (draft_plan.model + looked_up).tolist()
        tokens, logits = sum(known), wants.count(True)
        shaped = True in self.shaped[slots].tolist()
        filtered = True in self._filtered[slots].tolist()
        if not (any(drafts) or any(first_pass)):
            return Bounds(tokens, max(known, default=0), logits, shaped, filtered)
        return Bounds(
            tokens=tokens + sum(drafts),
            longest=max(map(add, known, drafts)),
            logits=logits + sum(compress(drafts, wants)),
            shaped=shaped,
            filtered=filtered,
            catch_up=sum(first_pass),
            longest_catch_up=max(first_pass),
            draft_rows=len(model) - model.count(0),
            depth=max(model),
            drafting=any(first_pass),
            looked_up=0 if looked_up is None else max(looked_up.tolist()),
            rejection_sampled=True in (self._samples_drafts[slots] & has_drafts).tolist(),
        )

    def _admit(self, a: NewSequence, message: SlotUpdate) -> None:
        slot, n, sizes = a.slot, len(a.tokens), self._sizes
        fits = 0 <= slot < sizes.slots - 1 and 0 <= a.kv_len_tokens < n <= a.max_total_tokens
        if not fits or a.max_total_tokens > sizes.tokens or len(a.blocks) > sizes.blocks:
            raise ValueError(
                f"admission of {a.request_id!r}: slot {slot}, {n} tokens, kv_len "
                f"{a.kv_len_tokens}, max_total {a.max_total_tokens} and {len(a.blocks)} blocks do "
                "not fit together, or do not fit the executor"
            )
        self._generation[slot] = a.generation
        message.put("tokens", slot, a.tokens.astype(np.int32, copy=False))
        message.put("blocks", slot, a.blocks.astype(np.int32, copy=False))
        self._put_values(a, message)
        if a.params.structured_outputs is not None:  # its masks include these tokens
            a = structs.replace(a, params=structs.replace(a.params, min_tokens=0))
        self.shaped[slot] = shapes_logits(a.params, has_stops=bool(a.stop_ids))
        if self.shaped[slot]:
            prompt = a.tokens[: a.num_prompt_tokens].tolist()
            new_tokens = a.max_total_tokens - len(prompt)
            check_lists(a.params, prompt, a.stop_ids, new_tokens, sizes)
            self._put_shaping(slot, sparse_of(a, sizes.vocab), message)
        elif self._has_lists[slot]:
            self._put_shaping(slot, neutral(sizes.vocab), message)
        self._has_lists[slot] = self.shaped[slot]
        if sizes.boundaries:
            pages = np.full(sizes.boundaries, NO_PAGE, dtype=np.int32)
            boundary = a.kv_len_tokens // self._block_size
            pages[boundary] = NO_PAGE if a.state_page is None else a.state_page
            message.put("pages", slot, pages)

    def _put_values(self, a: NewSequence, message: SlotUpdate) -> None:
        params, slot, vocab = a.params, a.slot, self._sizes.vocab
        mode = REJECTION
        if params.greedy:
            mode = GREEDY
        elif params.coupled:
            mode = COUPLED
        self._samples_drafts[slot] = mode == REJECTION
        top_k = vocab if params.top_k is None else min(params.top_k, vocab)
        # 1 keeps every token; a sum that rounds to 1 early must not cut the tail.
        top_p = params.top_p if params.top_p < 1 else np.inf
        self._filtered[slot] = mode != GREEDY and bool(
            top_k < vocab or top_p < np.inf or params.min_p
        )
        tokens, kv, draft_kv = len(a.tokens), a.kv_len_tokens, a.draft_kv_len_tokens
        ints = tokens, kv, draft_kv, a.max_total_tokens, 0, mode, top_k
        floats = params.logits_divisor, top_p, params.min_p
        values = _VALUES.pack(*ints, *floats, *split_seed(a.seed), a.choice)
        words = np.frombuffer(values, dtype=np.int32)
        message.put_words(self._words + slot * self._strides, words)

    @staticmethod
    def _put_shaping(slot: int, sparse: Sparse, message: SlotUpdate) -> None:
        for name in ("plain", "listed", "bias", "counts", "marks", "penalties"):
            message.put(name, slot, getattr(sparse, name))
        for name, value in (("num_listed", len(sparse.listed)), ("min_tokens", sparse.min_tokens)):
            message.put(name, slot, np.array([value], dtype=np.int32))

    def _append(self, deltas: Deltas, message: SlotUpdate) -> None:
        if len(deltas.append_slots):
            if int(deltas.append_indices.max()) >= self._sizes.blocks:
                raise ValueError(
                    f"append_indices: {int(deltas.append_indices.max())} is beyond "
                    f"{self._sizes.blocks} blocks a sequence"
                )
            message.scatter(
                "blocks", deltas.append_slots, deltas.append_indices, deltas.append_blocks
            )
        if deltas.state_pages.size:
            message.scatter("pages", *deltas.state_pages)


# --- penalties, biases and token restrictions -----------------------------------------------------


class Sparse(NamedTuple):
    """The fields of `triton_kernels.sampling.LogitsShaping` for one slot, unpadded."""

    plain: Words  # [ceil(V / 32)]
    listed: Words
    bias: NDArray[np.float32]
    counts: Words
    marks: Words
    penalties: NDArray[np.float32]  # [3]
    min_tokens: int


def shapes_logits(p: SamplingParams, *, has_stops: bool) -> bool:
    """Return whether a request changes logits; `has_stops`: some tokens end it."""
    return bool(
        p.allowed_token_ids is not None
        or p.banned_token_ids
        or (p.min_tokens and has_stops)
        or p.logit_bias
        or _has_penalties(p)
    )


def neutral(vocab_size: int) -> Sparse:
    """Return the lists that leave every logit unchanged."""
    empty = np.zeros(0, dtype=np.int32)
    plain = np.full(-(-vocab_size // 32), -1, dtype=np.int32)
    penalties = np.array([1, 0, 0], dtype=np.float32)
    return Sparse(plain, empty, empty.astype(np.float32), empty, empty, penalties, 0)


def check_lists(
    p: SamplingParams, prompt: Iterable[int], stop_ids: Iterable[int], max_new_tokens: int,
    sizes: ArenaSizes,
) -> None:  # fmt: skip
    """Raise FieldError if a request may need more entries at some time than a slot has."""
    stops = {i for i in stop_ids if i < sizes.vocab} if p.min_tokens else set()
    listed = stops.union(p.logit_bias)
    if p.repetition_penalty != 1:
        listed.update(prompt)
    listed.difference_update(p.banned_token_ids)
    if p.allowed_token_ids is not None:
        listed.intersection_update(p.allowed_token_ids)
    # With penalties every token that the sequence emits gets an entry, too.
    grows = max_new_tokens if _has_penalties(p) else 0
    if min(len(listed) + grows, sizes.vocab) <= sizes.listed:
        return
    field = "logit_bias" if len(p.logit_bias) >= len(stops) else "stop_token_ids"
    raise FieldError(
        field,
        f"with penalties and stop ids it lists up to {len(listed) + grows} tokens",
        f"list at most {sizes.listed}, or use --device cpu",
    )


def sparse_of(a: NewSequence, vocab_size: int) -> Sparse:
    """Return a sequence's lists, with its token counts so far."""
    params = a.params
    prompt, output = a.tokens[: a.num_prompt_tokens], a.tokens[a.num_prompt_tokens :]
    allowed = np.ones(vocab_size, dtype=np.bool_)
    if params.allowed_token_ids is not None:
        allowed[:] = False
        allowed[list(params.allowed_token_ids)] = True
    allowed[list(params.banned_token_ids)] = False
    min_tokens = max(params.min_tokens - len(output), 0)
    # EOS ids come from the model's files, which may name more ids than there are logits.
    stops = [i for i in a.stop_ids if i < vocab_size] if min_tokens else []
    bias, counts = np.zeros(vocab_size, dtype=np.float32), np.zeros(vocab_size, dtype=np.int32)
    marks = np.zeros(vocab_size, dtype=np.int32)
    bias[list(params.logit_bias)] = list(params.logit_bias.values())
    marks[stops] |= IS_STOP
    has_entry = (bias != 0) | (marks != 0)
    if _has_penalties(params):
        np.add.at(counts, output, 1)
        if params.repetition_penalty != 1:
            marks[prompt] |= IN_PROMPT
        has_entry |= (counts > 0) | (marks != 0)
    listed = np.flatnonzero(has_entry & allowed)
    return Sparse(
        plain=_bits(allowed & ~has_entry),
        listed=listed.astype(np.int32),
        bias=bias[listed],
        counts=counts[listed],
        marks=marks[listed],
        penalties=np.array(
            [params.repetition_penalty, params.presence_penalty, params.frequency_penalty],
            dtype=np.float32,
        ),
        min_tokens=min_tokens,
    )


def _has_penalties(p: SamplingParams) -> bool:
    return bool(p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty)


def _bits(flags: NDArray[np.bool_]) -> Words:
    """Pack flags into words: bit i % 32 of word i // 32 is flag i."""
    packed = np.packbits(flags, bitorder="little")
    padded = np.zeros(-(-len(flags) // 32) * 4, dtype=np.uint8)
    padded[: len(packed)] = packed
    words: Words = padded.view("<i4").astype(np.int32)
    return words
