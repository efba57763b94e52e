"""The host's record of every slot, and the message that brings the device's slots up to a plan.
Penalties, biases and token restrictions are lists for the sampling kernels."""

from __future__ import annotations

from collections.abc import Iterable
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
    """Collects runs of int32 words. `write` packs them in the format that
    `triton_kernels.slots.state.apply` reads: first those of new sequences, then runs that may
    overwrite them."""

    def __init__(self, places: dict[str, FieldPlace]) -> None:
        self._places = places
        self._first: list[tuple[int, Words]] = []
        self._second: list[tuple[int, Words]] = []
        self._scattered: list[tuple[Words, Words]] = []

    def put(self, name: str, slot: int, values: NDArray[np.generic]) -> None:
        """Set the first elements of a slot's field `name`."""
        offset, stride = self._places[name]
        words = np.ascontiguousarray(values).reshape(-1).view(np.int32)
        to = offset + slot * stride
        for start in range(0, len(words), RUN_WORDS):
            self._first.append((to + start, words[start : start + RUN_WORDS]))

    def put_all(self, name: str, values: NDArray[np.int32]) -> None:
        """Set a whole field, for every slot."""
        offset = self._places[name].offset
        self._second.append((offset, np.ascontiguousarray(values).reshape(-1)))

    def scatter(self, name: str, slots: Words, indices: Words, values: Words) -> None:
        """Set single elements; the last of several values for an element wins. Call it at most
        once per message and field, and not for a field that `put_all` sets."""
        offset, stride = self._places[name]
        to = offset + slots.astype(np.int64) * stride + indices
        _, last = np.unique(to[::-1], return_index=True)
        kept = len(to) - 1 - last
        self._scattered.append((to[kept].astype(np.int32), values[kept].astype(np.int32)))

    def num_runs(self) -> tuple[int, int]:
        """Return the number of runs in each of the two parts, which `apply` writes in order."""
        scattered = sum(len(to) for to, _ in self._scattered)
        return len(self._first), len(self._second) + scattered

    def num_words(self) -> int:
        payload = sum(len(words) for _, words in self._first + self._second)
        first, second = self.num_runs()
        scattered = second - len(self._second)
        return 3 * (first + second) + payload + scattered

    def write(self, out: Words) -> None:
        """Fill the first `num_words()` words of `out`."""
        num_runs = sum(self.num_runs())
        runs, at = out[: 3 * num_runs].reshape(-1, 3), 3 * num_runs
        row = 0
        for to, words in self._first + self._second:
            runs[row] = to, at, len(words)
            out[at : at + len(words)] = words
            row, at = row + 1, at + len(words)
        for to_many, words in self._scattered:
            part = runs[row : row + len(words)]
            part[:, 0], part[:, 1], part[:, 2] = to_many, at + np.arange(len(words)), 1
            out[at : at + len(words)] = words
            row, at = row + len(words), at + len(words)


Flags = NDArray[np.bool_]


class Bounds(NamedTuple):
    """Upper bounds of a step's sizes, for its launches. Only the device knows the true sizes, which
    depend on the tokens that the previous step accepted."""

    tokens: int
    longest: int  # most tokens of a row
    logits: int  # rows of logits
    catch_up: int  # tokens of the draft model's first pass
    longest_catch_up: int  # most of these tokens in a row
    draft_rows: int  # rows for which the draft model drafts
    depth: int  # most drafts of a row by the draft model
    drafting: bool  # the draft model runs
    looked_up: int  # most drafts of a row from a lookup
    rejection_sampled: bool  # some drafts are sampled, and verified by rejection sampling
    shaped: bool  # some row has penalties, biases or token restrictions
    filtered: bool  # some row that is not greedy has top-k, top-p or min-p


class HostSlots:
    """Occupied slots, the `generation` of each slot's sequence, and how it samples: `mode` is
    GREEDY, REJECTION or COUPLED."""

    def __init__(
        self, sizes: ArenaSizes, places: dict[str, FieldPlace], block_size: int = 1
    ) -> None:
        self._sizes, self._places, self._block_size = sizes, places, block_size
        count = sizes.slots
        self.generation = np.zeros(count, dtype=np.int32)
        self.mode = np.full(count, GREEDY, dtype=np.int32)
        self.shaped: Flags = np.zeros(count, dtype=np.bool_)
        self._filtered: Flags = np.zeros(count, dtype=np.bool_)
        # Slots whose lists on the device are not neutral.
        self._has_lists: Flags = np.zeros(count, dtype=np.bool_)
        self.clear()

    def clear(self) -> None:
        self._occupied: Flags = np.zeros(self._sizes.slots, dtype=np.bool_)
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

    def update(self, plan: StepPlan, draft_plan: DraftPlan) -> SlotUpdate:
        """Apply the deltas of `plan`, and return the message for the device. Raises ValueError for
        a plan that does not fit the slots, RowError for a new sequence that cannot be run here."""
        message = SlotUpdate(self._places)
        deltas = plan.deltas
        if deltas.reset:
            self.clear()
        self._occupied[deltas.released] = False
        for admission in deltas.new_sequences:
            with errors_of_row(admission.slot, admission.generation):
                self._admit(admission, message)
        self._append(deltas, message)
        slots = plan.slots
        if not (self._occupied[slots] & (self.generation[slots] == plan.generations)).all():
            raise ValueError(
                f"step {plan.step_id}: slots {slots.tolist()} do not hold the planned generations; "
                "send a plan with `deltas.reset` and the whole state"
            )
        work = np.zeros((len(SlotWork._fields), self._sizes.slots), dtype=np.int32)
        fields = SlotWork()
        work[fields.num_new_tokens, slots] = plan.query_lens - plan.num_drafts
        work[fields.wants_logits, slots] = plan.wants_logits
        if (draft_plan.model | draft_plan.catch_up | draft_plan.looked_up).any():
            work[fields.num_drafts, slots] = draft_plan.model
            work[fields.catch_up, slots] = draft_plan.catch_up
            work[fields.looked_up, slots] = draft_plan.looked_up
            work[fields.drafting] = True
        for slot, (known, guess) in draft_plan.guesses.items():
            message.put("guess", slot, np.array([len(guess), known, *guess], dtype=np.int32))
        message.put_all("work", work)
        return message

    def bounds(self, plan: StepPlan, draft_plan: DraftPlan) -> Bounds:
        deep, drafts = draft_plan.model > 0, draft_plan.model + draft_plan.looked_up
        new = plan.query_lens - plan.num_drafts
        return Bounds(
            tokens=int((new + drafts).sum()),
            longest=int((new + drafts).max(initial=0)),
            logits=int(((1 + drafts) * plan.wants_logits).sum()),
            catch_up=int((draft_plan.catch_up + deep).sum()),
            longest_catch_up=int((draft_plan.catch_up + deep).max(initial=0)),
            draft_rows=int(deep.sum()),
            depth=int(draft_plan.model.max(initial=0)),
            drafting=bool((draft_plan.model | draft_plan.catch_up).any()),
            looked_up=int(draft_plan.looked_up.max(initial=0)),
            rejection_sampled=bool((self.mode[plan.slots][deep] == REJECTION).any()),
            shaped=bool(self.shaped[plan.slots].any()),
            filtered=bool(self._filtered[plan.slots].any()),
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
        self._occupied[slot], self.generation[slot] = True, a.generation
        self._put_sequence(a, message)
        self._put_sampling(a, message)
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

    def _put_sequence(self, a: NewSequence, message: SlotUpdate) -> None:
        message.put("tokens", a.slot, a.tokens.astype(np.int32, copy=False))
        message.put("blocks", a.slot, a.blocks.astype(np.int32, copy=False))
        for name, value in (
            ("num_tokens", len(a.tokens)),
            ("kv_len", a.kv_len_tokens),
            ("draft_kv_len", a.draft_kv_len_tokens),
            ("max_total", a.max_total_tokens),
            ("failed", 0),
        ):
            message.put(name, a.slot, np.array([value], dtype=np.int32))

    def _put_sampling(self, a: NewSequence, message: SlotUpdate) -> None:
        params, slot = a.params, a.slot
        mode = REJECTION
        if params.greedy:
            mode = GREEDY
        elif params.coupled:
            mode = COUPLED
        self.mode[slot] = mode
        top_k = self._sizes.vocab if params.top_k is None else min(params.top_k, self._sizes.vocab)
        # 1 keeps every token; a sum that rounds to 1 early must not cut the tail.
        top_p = params.top_p if params.top_p < 1 else np.inf
        self._filtered[slot] = mode != GREEDY and bool(
            top_k < self._sizes.vocab or top_p < np.inf or params.min_p
        )
        for name, values, dtype in (
            ("modes", [mode], np.int32),
            ("top_k", [top_k], np.int32),
            ("temperatures", [params.logits_divisor], np.float32),
            ("top_p", [top_p], np.float32),
            ("min_p", [params.min_p], np.float32),
            ("keys", split_seed(a.seed), np.int64),
            ("choices", [a.choice], np.int64),
        ):
            message.put(name, slot, np.array(values, dtype=dtype))

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
