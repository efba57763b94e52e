"""The drafter that a slot tries first is learnt from verdicts and replays, by chain.

Texts are known beforehand and rows greedy: a draft is accepted if it equals the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from cbatch.runtime.cpu.drafters.draft_model import DraftModel
from cbatch.runtime.drafting.chain import ChainDrafter
from cbatch.runtime.drafting.contract import DraftRows, Proposal
from cbatch.runtime.drafting.drafter_choice import DrafterChoice
from cbatch.runtime.drafting.lookup import LookupDrafter
from cbatch.runtime.drafting.ngram import NgramLookup
from cbatch.runtime.drafting.suffix import SuffixLookup
from cbatch.runtime.drafting.turns import Turns
from cbatch.runtime.input_batch import InputBatch
from cbatch.runtime.model.arrays import I64
from tests.runtime.engines import admission

VOCAB, PROMPT_TOKENS, LENGTH_TOKENS, K = 400, 200, 1100, 4
SINGLES = (("model",), ("suffix",))
CHAINS = (("suffix", "model"), ("model", "suffix"), ("suffix", "ngram", "model"))
PRICE = 0.02


def edited(rng: np.random.Generator) -> list[int]:
    """Return a prompt repeated again and again, with one token in 25 changed each time."""
    text = rng.integers(0, VOCAB, PROMPT_TOKENS)
    rounds = [text]
    while len(rounds) * PROMPT_TOKENS < LENGTH_TOKENS:
        text = np.where(rng.random(PROMPT_TOKENS) < 0.04, rng.integers(0, VOCAB), text)
        rounds.append(text)
    return np.concatenate(rounds)[:LENGTH_TOKENS].tolist()


def free(rng: np.random.Generator) -> list[int]:
    """Return few words in random order: pairs repeat, but continue differently."""
    return rng.integers(0, 12, LENGTH_TOKENS).tolist()


class KnowingModel(DraftModel):
    """A draft model that knows a share of each text's tokens, and guesses 399 elsewhere."""

    def __init__(self, texts: dict[int, list[int]], shares: dict[int, float]) -> None:
        self.context_tokens = LENGTH_TOKENS
        self._says: dict[int, I64] = {}
        for seed, text in texts.items():
            known = np.random.default_rng(seed).random(len(text)) < shares[seed]
            self._says[seed] = np.where(known, text, VOCAB - 1)
        self._text_of: dict[int, int] = {}

    def bind(self, table: InputBatch, num_blocks: int) -> None:
        self.table, self.kv_len = table, np.zeros(table.max_num_seqs, dtype=np.int64)

    def admit(self, admission: Any) -> None:
        self._text_of[admission.slot] = int(admission.request_id)

    def release(self, slot: int) -> None:
        pass

    def truncate(self, slots: Any, kv_len_tokens: I64) -> None:
        self.kv_len[slots] = kv_len_tokens

    def propose(self, rows: DraftRows) -> Proposal:
        drafts = [
            self._says[self._text_of[slot]][known : known + K]
            for slot, known in zip(rows.slots.tolist(), rows.num_tokens.tolist(), strict=True)
        ]
        broken = np.zeros(len(drafts), dtype=np.bool_)
        return Proposal(np.array(drafts).reshape(-1, K), rows.num_drafts, None, broken)


class Served:
    """A chain and the texts in its slots; text i begins in slot i."""

    def __init__(self, chain: tuple[str, ...], price: float = PRICE) -> None:
        rng = np.random.default_rng(3)
        self.texts = {i: (edited, free)[i % 2](rng) for i in range(6)}
        model = KnowingModel(self.texts, {i: (0.3, 0.85)[i % 2] for i in range(6)})
        lookups = {"ngram": NgramLookup(), "suffix": SuffixLookup()}
        loaded = {name: LookupDrafter(lookup) for name, lookup in lookups.items()}
        self.chain = ChainDrafter(model=model, lookups=loaded, default=chain, model_price=price)
        self.table = InputBatch(8, 16, VOCAB)
        self.chain.bind(self.table, 16)
        self.slot_of: dict[int, int] = {}
        self.steps, self.accepted = np.zeros((2, 6))
        for i in self.texts:
            self.admit(i, i, PROMPT_TOKENS)

    def admit(self, text: int, slot: int, known: int) -> None:
        entered = admission(slot, self.texts[text][:known], max_total=LENGTH_TOKENS)
        entered = structs.replace(entered, request_id=str(text))
        self.table.admit(entered)
        self.chain.admit(entered)
        self.slot_of[text] = slot

    def move(self, slots: Sequence[int]) -> None:
        """Preempt and resume all: text i in slot `slots[i]`."""
        known = {i: int(self.table.num_tokens[slot]) for i, slot in self.slot_of.items()}
        for slot in self.slot_of.values():
            self.table.release(slot)
            self.chain.release(slot)
        for i, slot in enumerate(slots):
            self.admit(i, slot, known[i])

    def step(self) -> None:
        table, ids = self.table, list(self.slot_of)
        slots = np.array([self.slot_of[i] for i in ids], dtype=np.int32)
        known = table.num_tokens[slots]
        depths = np.full(len(ids), K)
        proposal = self.chain.propose(DraftRows(slots, known, depths, np.zeros_like(slots)))
        for row, i in enumerate(ids):
            drafts = proposal.tokens[row, : proposal.num_drafted[row]].tolist()
            start, count = int(known[row]), 0
            while count < len(drafts) and drafts[count] == self.texts[i][start + count]:
                count += 1
            emitted = self.texts[i][start : start + count + 1]
            table.tokens[slots[row], start : start + count + 1] = emitted
            table.num_tokens[slots[row]] = start + count + 1
            self.steps[i] += 1
            self.accepted[i] += count
        self.chain.truncate(slots, table.num_tokens[slots] - 1)
        self.chain.score(slots, proposal.num_drafted)

    def run(self) -> Served:
        """Run until the first text nears its end."""
        while self.table.num_tokens.max() < LENGTH_TOKENS - K - 1:
            self.step()
        return self

    @property
    def mean_accepted(self) -> np.ndarray:
        return self.accepted / self.steps

    def first(self) -> list[str]:
        """Return the drafter that is first for each text."""
        turns = self.chain._turns
        return [
            next(n for t, n in turns.order if turns.has_turn(t, n, np.array([slot]))[0])
            for slot in self.slot_of.values()
        ]


@pytest.fixture(scope="module")
def best_single() -> np.ndarray:
    """Return acceptance by text; no single drafter is the best for all."""
    means = np.array([Served(chain).run().mean_accepted for chain in SINGLES])
    assert means.argmax(axis=0).tolist() == [1, 0] * 3
    return means.max(axis=0)


@pytest.mark.parametrize("chain", CHAINS, ids="-".join)
def test_every_text_gets_its_best_drafter_whatever_the_order(chain, best_single, monkeypatch):
    learnt = Served(chain).run()
    assert (learnt.mean_accepted >= 0.97 * best_single).all()
    monkeypatch.setattr(Turns, "learn", lambda self, slots, num_drafted: None)
    first_guess = Served(chain, price=0.0).run()
    assert learnt.mean_accepted.mean() > 1.1 * first_guess.mean_accepted.mean()


def test_credit_that_goes_to_another_drafter_is_noticed(best_single, monkeypatch):
    credit = Turns.credit

    def misplaced(self: Turns, name: str, slots: Any) -> None:
        credit(self, "model" if name == "suffix" else "suffix", slots)

    monkeypatch.setattr(Turns, "credit", misplaced)
    assert (Served(("suffix", "model")).run().mean_accepted < 0.9 * best_single).any()


def test_what_was_learnt_follows_a_sequence_to_another_slot(monkeypatch):
    def moved() -> list[str]:
        served = Served(("suffix", "model"))
        for _ in range(60):
            served.step()
        assert served.first() == ["suffix", "model"] * 3
        served.move([1, 2, 3, 4, 5, 0])
        return served.first()

    assert moved() == ["suffix", "model"] * 3
    enter = DrafterChoice.enter

    def by_slot(self: DrafterChoice, slot: int, chain: Any, sums: Any = None) -> None:
        enter(self, slot, chain, self.leave(slot))

    monkeypatch.setattr(DrafterChoice, "enter", by_slot)
    assert moved() != ["suffix", "model"] * 3


@pytest.mark.parametrize("begins", ["as a copy", "as free text"])
def test_a_sequence_that_changes_is_followed(begins):
    """Evidence about lookups arrives while the model drafts, and the model is tried now and
    then."""
    served, turn = Served(("suffix", "model")), PROMPT_TOKENS + 250
    copies = range(0, 6, 2)
    for i in copies:
        text, spoken = served.texts[i], served.texts[i + 1]
        if begins == "as a copy":
            text[turn:] = spoken[turn:]
        else:
            text[PROMPT_TOKENS:turn] = spoken[PROMPT_TOKENS:turn]
    shares = dict.fromkeys(served.texts, 0.85)
    served.chain.model._says.update(KnowingModel(served.texts, shares)._says)
    firsts: dict[bool, list[str]] = {True: [], False: []}
    while served.table.num_tokens.max() < LENGTH_TOKENS - K - 1:
        served.step()
        for i in copies:
            known = int(served.table.num_tokens[served.slot_of[i]])
            if not turn - 150 < known < turn + 150 and known > PROMPT_TOKENS + 60:
                copied = (known < turn) == (begins == "as a copy")
                firsts[copied].append(served.first()[i])
    assert firsts[True].count("suffix") > 0.8 * len(firsts[True]) > 10
    assert firsts[False].count("model") > 0.8 * len(firsts[False]) > 10


def test_a_slot_follows_the_chain_of_its_sequence() -> None:
    """Credits learnt by a chain of one stay when its sequence leaves, for the next one."""
    served = Served(("suffix",))
    assert served.first() == ["suffix"] * 6
    served.chain.default = ("model",)
    served.move([3, 0, 1, 2, 6, 7])
    assert served.first() == ["model"] * 6
    served.chain.default = ("ngram", "suffix")
    served.move(range(6))
    assert served.first() == ["ngram"] * 6
    served.chain.default = ("suffix",)
    served.move([0, 1, 2, 6, 7, 5])
    assert served.first() == ["suffix"] * 6
    has_several = served.chain._turns._choice.has_several
    assert not has_several[[0, 1, 2, 5, 6, 7]].any()
