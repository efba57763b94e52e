"""Structured outputs: the processor compared with its definition, and through an engine with
drafts.

The base of every comparison of tokens is a run without speculation. Grammars are over `VOCABULARY`,
whose ids are characters and pairs of letters, so that a text can be encoded in many ways.
"""

from __future__ import annotations

import functools
import json
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.core.request.request import FinishReason, StructuredOutputs
from cbatch.grammars import Grammars
from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.cpu.drafters.draft_model import DraftModel
from cbatch.runtime.drafting.chain import ChainDrafter
from cbatch.runtime.drafting.contract import Drafter
from cbatch.runtime.drafting.lookup import LookupDrafter
from cbatch.runtime.drafting.lookups import NgramLookup, SuffixLookup
from cbatch.runtime.sampling import logits_processors as processors
from cbatch.runtime.sampling.structured import Structured
from cbatch.text import TextTokenizer
from tests.chi_square import chi_square_z
from tests.runtime.engines import Run, make_request, run_engine, tiny_model
from tests.runtime.reference import next_logits, slow_filter
from tests.text.toy_tokenizers import printable

VOCABULARY = TextTokenizer(printable(), "toy")
VOCAB, EOS = VOCABULARY.vocab_size, 0
PADDED = VOCAB + 3  # a model's vocabulary may be larger than its tokenizer's
GRAMMARS = Grammars(lambda: VOCABULARY, PADDED, (EOS, 5000))
TOKENS = [VOCABULARY.decode([i]) for i in range(VOCAB)]


def encode(text: str) -> list[int]:
    return VOCABULARY.encode(text)


# --- the processor --------------------------------------------------------------------------------

CHOICES = ("abba", "abbey", "bad", "cab", 'say "h"\n')


def slow_allowed(output: list[int]) -> set[int]:
    """Return the ids after which one of `CHOICES` can still be reached, by the definition."""
    if EOS in output:
        return {EOS} if slow_text(output) in CHOICES else set()
    text = slow_text(output)
    ids = {i for i in range(1, VOCAB) if any(c.startswith(text + TOKENS[i]) for c in CHOICES)}
    return ids | ({EOS} if text in CHOICES else set())


def slow_text(output: list[int]) -> str:
    ids = output[: output.index(EOS)] if EOS in output else output
    return "".join(TOKENS[i] for i in ids)


def allowed_by(structured: Structured) -> set[int]:
    row = torch.zeros(PADDED)
    structured.shape(row)
    bits = np.packbits(row.numpy() == 0, bitorder="little")
    assert structured.allowed_bits().tobytes() == bits.tobytes()
    return set((row == 0).nonzero()[:, 0].tolist())


# Moves of a walk: append an allowed id, append any id, or take ids back.
moves_strategy = st.lists(
    st.tuples(
        st.sampled_from(["allowed", "allowed", "allowed", "any", "back"]), st.integers(0, 99)
    ),
    max_size=25,
)


def walk(moves: list[tuple[str, int]]) -> None:
    def new() -> Structured:
        return Structured(GRAMMARS, StructuredOutputs(choice=CHOICES), PADDED)

    structured, output = new(), []
    for kind, number in [("back", 0), *moves]:
        if kind == "back":
            count = min(number % 4, len(output))
            structured.rollback(count)
            output = output[: len(output) - count]
        else:
            ids = sorted(slow_allowed(output)) if kind == "allowed" else []
            token = ids[number % len(ids)] if ids else number
            structured.advance(token)
            output.append(token)
        fresh = new()
        for token in output:
            fresh.advance(token)
        assert allowed_by(structured) == allowed_by(fresh), "not what a rebuilt one gives"
        if all(token in slow_allowed(output[:n]) for n, token in enumerate(output)):
            check_allowed(structured, output)


def check_allowed(structured: Structured, output: list[int]) -> None:
    """Compare with the definition. Where the next character is forced, llguidance allows one of the
    encodings, the tokenizer's own."""
    allowed, want = allowed_by(structured), slow_allowed(output)
    starts = {TOKENS[i][:1] for i in want}
    assert allowed <= want and {TOKENS[i][:1] for i in allowed} == starts, output
    assert allowed == want or len(starts) == 1, output
    drafts, run = [*encode("abba"), EOS, EOS], [*output]
    while drafts and drafts[0] in slow_allowed(run) and EOS not in run:
        run.append(drafts.pop(0))
    assert structured.num_allowed([*encode("abba"), EOS, EOS]) == len(run) - len(output)


@given(moves_strategy)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_what_may_follow_is_its_definition(moves):
    walk(moves)


class _LimitedMatcher:
    """A matcher that reaches its limits after `limit` tokens, until a new one is made."""

    def __init__(self, matcher: Any, limit: int) -> None:
        self._matcher, self._most, self._seen = matcher, limit, 0

    def try_consume_tokens(self, tokens: list[int]) -> int:
        self._seen += 1
        return 0 if self.is_error() else self._matcher.try_consume_tokens(tokens)

    def is_error(self) -> bool:
        return self._seen > self._most

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


def test_a_matcher_worn_out_by_drafts_is_replaced():
    def tired(outputs: StructuredOutputs) -> Any:
        return _LimitedMatcher(GRAMMARS.matcher(outputs), limit)

    wearing, outputs = (
        SimpleNamespace(
            eos_ids=(EOS,),
            matcher=tired,
            plain_token=GRAMMARS.plain_token,
            forbid_repeats=GRAMMARS.forbid_repeats,
        ),
        StructuredOutputs(choice=CHOICES),
    )
    limit, (a, b) = 4, encode("a")[:1] + encode("b")[:1]
    worn, fresh = Structured(wearing, outputs, PADDED), Structured(GRAMMARS, outputs, PADDED)
    for _ in range(5):
        for structured in (worn, fresh):
            structured.advance(a)
            structured.advance(b)
        assert allowed_by(worn) == allowed_by(fresh)
        for structured in (worn, fresh):
            structured.rollback(2)
    limit = 0  # a prefix beyond the limits by itself allows no token
    worn = Structured(wearing, outputs, PADDED)
    worn.advance(a)
    assert allowed_by(worn) == set() and allowed_by(fresh)


# --- through the engine ---------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 120},
        "b": {"type": "array", "items": {"enum": ["x", "yes", "no"]}, "maxItems": 3},
        "c": {"type": "string", "maxLength": 6},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
UNIQUE = {"type": "array", "uniqueItems": True, "items": {"enum": ["ab", "abc", "b"]}}
UNIQUE = {"type": "object", "properties": {"t": UNIQUE | {"minItems": 3}}, "required": ["t"]}
UNIQUE["additionalProperties"] = False
OUTPUTS: tuple[StructuredOutputs | None, ...] = (
    StructuredOutputs(json=SCHEMA),
    StructuredOutputs(json_object=True),
    StructuredOutputs(regex=r"(ab|cd|[0-9]{2}){6,20}!"),
    StructuredOutputs(choice=("a cab has a bed", "a bad egg", "a cab had a bag")),
    StructuredOutputs(grammar='start: "f" "(" list? ")"\nlist: /[a-h]{1,4}/ ("," /[a-h]{1,4}/)*'),
    StructuredOutputs(json=UNIQUE),
    None,
)


def follows(index: int, text: str) -> bool:
    """Check a complete text by the definition of `OUTPUTS[index]`."""
    if index == 5:
        return sorted(json.loads(text)["t"]) == ["ab", "abc", "b"]
    if index in (0, 1):
        value = json.loads(text)
        return index == 1 or (
            list(value) == ["a", "b", "c"]
            and 0 <= value["a"] <= 120
            and len(value["b"]) <= 3
            and set(value["b"]) <= {"x", "yes", "no"}
            and len(value["c"]) <= 6
        )
    patterns = {
        2: r"(ab|cd|[0-9]{2}){6,20}!",
        3: "a cab has a bed|a bad egg|a cab had a bag",
        4: r"f\(([a-h]{1,4}(,[a-h]{1,4})*)?\)",
    }
    return bool(re.fullmatch(patterns[index], text))


@functools.cache
def target() -> Model:
    return tiny_model(vocab_size=PADDED)


@functools.cache
def draft(noise: float = 0.05, seed: int = 1) -> DraftModel:
    return DraftModel(tiny_model(vocab_size=PADDED, noise=noise, seed=seed))


def requests(**extra: Any) -> list[Any]:
    rng = np.random.default_rng(5)
    return [
        make_request(
            f"r{i}",
            rng.integers(1, VOCAB, 5 + 3 * i).tolist(),
            **({"max_tokens": 48, "ignore_eos": False, "structured_outputs": outputs} | extra),
        )
        for i, outputs in enumerate(OUTPUTS)
    ]


def run(batch: list[Any], drafter: Drafter | None = None, **options: Any) -> Run:
    # The scheduler needs a draft model's context for any drafter.
    model = draft().model if drafter is not None else None
    settings = {"drafting": drafter, "grammars": GRAMMARS, "eos_ids": (EOS,)}
    return run_engine(batch, target(), model, **settings, **options)


def lookups() -> ChainDrafter:
    loaded = {"ngram": LookupDrafter(NgramLookup()), "suffix": LookupDrafter(SuffixLookup())}
    return ChainDrafter(model=None, lookups=loaded, default=("suffix", "ngram"))


SAMPLED = {"temperature": 1.0, "verification": "coupled"}


@functools.cache
def plain(sampled: bool = False) -> Run:
    done = run(
        requests(**(SAMPLED if sampled else {})), max_num_seqs=1, enable_prefix_caching=False
    )
    for i in range(len(OUTPUTS) - 1):
        ids, reason = done.outputs[f"r{i}"], done.reasons[f"r{i}"]
        if reason is FinishReason.STOP:
            assert ids[-1] == EOS and follows(i, slow_text(ids)), (i, slow_text(ids))
        else:  # an output cut by its limit is the beginning of an allowed text
            matcher = GRAMMARS.matcher(OUTPUTS[i])
            assert matcher.try_consume_tokens(ids) == len(ids) == 48
    assert list(done.reasons.values()).count(FinishReason.STOP) >= 3
    return done


def assert_speculated(done: Run) -> None:
    assert (done.drafted >= 2).any() and (done.accepted >= 2).any()
    assert (done.accepted < done.drafted).sum() > 5, "nothing was rejected"


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
def test_speculation_moves_no_token(sampled, depth):
    batch = requests(**(SAMPLED if sampled else {}))
    done = run(batch, draft(), lookahead="fixed:4", depth=depth)
    assert_speculated(done)
    assert done.outputs == plain(sampled).outputs and done.reasons == plain(sampled).reasons


@pytest.mark.parametrize("sampled", [False, True])
def test_nor_do_preemptions(sampled):
    batch = requests(**(SAMPLED if sampled else {}))
    done = run(batch, draft(), lookahead="fixed:3", num_blocks=19, max_num_batched_tokens=64)
    assert done.scheduler.stats.preemptions > 0 and (done.accepted >= 2).any()
    assert done.outputs == plain(sampled).outputs


def test_lookups_are_cut_where_the_grammar_forbids_them(monkeypatch):
    """Prompts repeat text that the grammar forbids: guesses of it are not even verified."""
    again = encode("f(abc,xyz) f(abc,xyz) f(abc,xyz) ")
    batch = [
        make_request("r", again, **_structured_params(4)),
        make_request("free", again, max_tokens=24),
    ]
    base = run(batch)
    done = run(batch, lookups(), lookahead="fixed:6")
    assert done.outputs == base.outputs and done.executor.drafted
    monkeypatch.setattr(processors.LogitsProcessors, "num_allowed", lambda *args: len(args[2]))
    blind = run(batch, lookups(), lookahead="fixed:6")
    assert blind.outputs == base.outputs

    def drafted(of: Run, name: str) -> int:
        return sum(row[1] for row in of.executor.row_of_request[name])

    assert drafted(done, "r") < drafted(blind, "r")
    assert drafted(done, "free") == drafted(blind, "free")


def _structured_params(index: int, **extra: Any) -> dict[str, Any]:
    return {"max_tokens": 40, "ignore_eos": False, "structured_outputs": OUTPUTS[index]} | extra


# --- the law under rejection ----------------------------------------------------------------------

WORDS = tuple(a + b + c for a in "abc" for b in "abc" for c in "abc")
FILTERS = (1.6, 8, 0.98, 0.02)
LAW_PROMPT, LAW_COUNT = (20, 30, 40), 600


def law_of_words() -> dict[tuple[int, ...], float]:
    """Return the exact law over all encodings of each of `WORDS`, from the model's masked, filtered
    logits."""
    law, open_ends = {}, {(): 1.0}
    while open_ends:
        logits = next_logits(target(), [[*LAW_PROMPT, *prefix] for prefix in open_ends])
        grown: dict[tuple[int, ...], float] = {}
        for (prefix, chance), row in zip(open_ends.items(), logits, strict=True):
            text = "".join(TOKENS[i] for i in prefix)
            ids = [i for i in range(1, VOCAB) if any(w.startswith(text + TOKENS[i]) for w in WORDS)]
            masked = np.full(PADDED, -np.inf)
            ids += [EOS] if text in WORDS else []
            masked[ids] = row[ids]
            for token in ids:
                p = chance * slow_filter(masked.tolist(), *FILTERS)[token]
                if p > 0:
                    (law if token == EOS else grown)[(*prefix, token)] = p
        open_ends = grown
    assert abs(sum(law.values()) - 1) < 1e-9
    return law


def sampled_words() -> Run:
    how = dict(zip(("temperature", "top_k", "top_p", "min_p"), FILTERS, strict=True))
    how |= {"verification": "rejection", "ignore_eos": False, "max_tokens": 8}
    batch = [
        make_request(
            f"r{i}",
            LAW_PROMPT,
            seed=i,
            structured_outputs=StructuredOutputs(choice=WORDS),
            **how,
        )
        for i in range(LAW_COUNT)
    ]
    return run(batch, draft(seed=2), lookahead="fixed:3", max_num_seqs=64, check=False)


def law_z(done: Run) -> float:
    law = law_of_words()
    counts = {key: 0 for key in law}
    for output in done.outputs.values():
        key = tuple(output)
        assert key in counts, "not one of the words, or none that the filters leave"
        counts[key] += 1
    return chi_square_z(list(counts.values()), list(law.values()))


def test_the_law_is_the_targets_own_under_the_grammar():
    """Chi-square over every encoding of every word; |z| < 5 fails by chance in 6 of 10 million."""
    assert len(law_of_words()) > len(WORDS)
    done = sampled_words()
    assert (done.accepted >= 2).any() and (done.accepted < done.drafted).sum() > 150
    assert abs(law_z(done)) < 5


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter, lookahead", [(None, "off"), ("model", "fixed:4")])
def test_ends(drafter, lookahead):
    """A dead end is an error, `min_tokens` yields to a text that is complete, and after the end
    only the end is allowed."""
    allowed = tuple({*encode("a cab"), EOS})
    ways = {"dead": {"allowed_token_ids": allowed}, "min": {"min_tokens": 30}}
    ways["after"] = {"ignore_eos": True}
    batch = [
        make_request(n, [3, 4, 5], **_structured_params(3, **more)) for n, more in ways.items()
    ]
    done = run(batch, drafter and draft(), lookahead=lookahead)
    reasons = FinishReason.ERROR, FinishReason.STOP, FinishReason.LENGTH
    assert tuple(done.reasons[name] for name in ways) == reasons
    assert (done.messages["dead"] or "").startswith("structured_outputs")
    assert slow_text(done.outputs["dead"]) in "a cab ha"
    output = done.outputs["after"]
    assert follows(3, slow_text(done.outputs["min"])) and follows(3, slow_text(output))
    assert len(output) == 40 and set(output[output.index(EOS) :]) == {EOS}
