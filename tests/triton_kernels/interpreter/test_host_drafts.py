"""The host's part of a GPU step: lookup drafts, and grammars. Without a plan in flight every step
is that of the CPU executor; with one, lookups are a step late."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from cbatch.core.request.request import Request, StructuredOutputs
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.grammars import Grammars
from cbatch.runtime.drafting.lookups import NgramLookup, SuffixLookup
from cbatch.runtime.gpu import known_tokens as known_module
from cbatch.runtime.gpu.host_drafts import LookupSettings
from cbatch.text import TextTokenizer
from tests.runtime.engines import make_request
from tests.text.toy_tokenizers import printable
from tests.triton_kernels.interpreter.light import (
    use_reference_verdicts,
    use_references,
    without_overflow_checks,
)
from tests.triton_kernels.interpreter.test_gpu_executor import happened
from tests.triton_kernels.interpreter.twins import Differs, Pair, Twins, run_twins
from triton_kernels.sampling.mask import mask_logits, mask_reference, words_of
from triton_kernels.slots import guesses as guesses_module

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

VOCAB = 12  # so few that greedy text repeats itself
VOCABULARY = TextTokenizer(printable(), "toy")
TEXTS = VOCABULARY.vocab_size
GRAMMARS = Grammars(lambda: VOCABULARY, TEXTS, (0,))


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    without_overflow_checks(monkeypatch)
    use_references(monkeypatch)
    use_reference_verdicts(monkeypatch)


class LateTwins(Twins):
    """Twins whose drafts are a step late, so that only the final output equals the CPU's."""

    def submit(self, plan: StepPlan) -> None:
        self._notice(plan)
        self._expected.append((plan, None))  # type: ignore[arg-type]
        self.gpu.submit(plan)

    def wait(self) -> StepResult:
        plan, _ = self._expected.popleft()
        result = self.gpu.wait()
        self._notice_result(plan, result)
        return result


def settings_of(*default: str) -> LookupSettings:
    lookups = {"ngram": NgramLookup(), "suffix": SuffixLookup()}
    return LookupSettings(lookups, default)


def chained(model: bool, **params: Any) -> list[Request]:
    """Return requests with chains, and one with the default chain; all repeat themselves soon."""
    chains: list[Any] = [("ngram",), ("suffix",), None]
    if model:
        chains += [("ngram", "model"), ("model", "suffix"), ("model",)]
    return [
        make_request(f"r{i}", [1, 5, 3, 1, 5, 3, i], drafter=chain, **params)
        for i, chain in enumerate(chains)
    ]


def run_chains(requests: list[Request], **more: Any) -> tuple[dict[str, list[int]], Counter[str]]:
    """Run them with a draft model, too."""
    return run_twins(
        requests,
        Pair(vocab_size=VOCAB),
        Pair(noise=0.08, vocab_size=VOCAB),
        lookups=settings_of("suffix", "model"),
        lookahead="fixed:3",
        **more,
    )


def test_chains_draft_what_they_do_on_a_cpu() -> None:
    outputs, seen = run_chains(chained(True, max_tokens=14))
    assert {len(tokens) for tokens in outputs.values()} == {14}
    happened(seen, "accepted", "rejected", "all accepted", "slots used again", "catch-ups")


SAMPLED = [
    {"verification": verification, "temperature": 0.3, "max_tokens": 8}
    for verification in ("rejection", "coupled")
]


@pytest.mark.parametrize("model", [True, False])
def test_lookup_drafts_are_verified_as_on_a_cpu(model: bool) -> None:
    chains = [("suffix",), ("model",)] if model else [("suffix",)]
    requests = [
        make_request(f"r{i} {chain}", [1, 5, 3, 1, 5, 3, 2], drafter=chain, seed=i, **params)
        for i, params in enumerate(SAMPLED)
        for chain in chains
    ]
    _, seen = run_twins(
        requests,
        Pair(vocab_size=VOCAB),
        Pair(noise=0.05, vocab_size=VOCAB) if model else None,
        lookups=settings_of("suffix"),
        lookahead="fixed:2",
    )
    happened(seen, "accepted", "rejected")


def test_late_drafts_leave_the_text_as_it_is() -> None:
    """Text of few words repeats itself: most guesses of the step before are accepted."""
    requests = chained(True, max_tokens=14)
    plain, _ = run_twins(requests, Pair(vocab_size=VOCAB), max_num_seqs=6)
    outputs, seen = run_chains(requests, depth=1, twins_kind=LateTwins)
    assert outputs == plain
    happened(seen, "plans in flight", "accepted", "rejected", "drafted fewer", "slots used again")


def test_a_guess_that_was_not_checked_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: tokens emitted since are ignored, and drafts are one place too early."""
    real = guesses_module.take_guesses

    def unchecked(state: Any, layout: Any, **more: Any) -> None:
        state.guess[:, 1] -= 1
        real(state, layout, **more)

    monkeypatch.setattr("cbatch.runtime.gpu.device_steps.take_guesses", unchecked)
    with pytest.raises(Differs):
        run_twins(
            chained(False, max_tokens=12),
            Pair(vocab_size=VOCAB),
            lookups=settings_of("suffix"),
            lookahead="fixed:3",
        )


STRUCTURED: list[dict[str, Any]] = [
    {"structured_outputs": StructuredOutputs(regex="[ab]{2,4}(cd)*e")},
    {"structured_outputs": StructuredOutputs(choice=("abba", "bad", "cab"))},
    {"structured_outputs": StructuredOutputs(regex="a+"), "min_tokens": 4, "logit_bias": {5: 1.0}},
    {"structured_outputs": StructuredOutputs(regex="[a-z ]*"), "temperature": 0.9, "logprobs": 2},
    {"structured_outputs": StructuredOutputs(regex="ab"), "banned_token_ids": None},
    {},
]


def structured() -> list[Request]:
    """Return a request of each kind, one that reaches a dead end, and one without a grammar."""
    no_b = tuple(i for i in range(TEXTS) if "b" in VOCABULARY.decode([i]))
    requests = []
    for i, params in enumerate(STRUCTURED):
        if "banned_token_ids" in params:
            params = params | {"banned_token_ids": no_b}
        settings = {"max_tokens": 7, "ignore_eos": False} | params
        requests.append(make_request(f"r{i}", VOCABULARY.encode("ab ab ab"), **settings))
    return requests


def run_structured(drafts: bool, **more: Any) -> tuple[dict[str, list[int]], Counter[str]]:
    return run_twins(
        structured(),
        Pair(vocab_size=TEXTS),
        lookups=settings_of("suffix") if drafts else None,
        grammars=GRAMMARS,
        lookahead="fixed:3" if drafts else "off",
        eos_ids=(0,),
        max_num_batched_tokens=40,
        **more,
    )


@pytest.mark.parametrize("depth, drafts", [(0, True), (1, False), (1, True)])
def test_outputs_follow_their_grammars(depth: int, drafts: bool) -> None:
    kind = LateTwins if drafts and depth else Twins
    outputs, seen = run_structured(drafts, depth=depth, twins_kind=kind)
    happened(seen, "no token", *(["plans in flight"] if depth else []))
    texts = [VOCABULARY.decode([t for t in outputs[f"r{i}"] if t]) for i in range(6)]
    assert texts[0][:2].strip("ab") == "" and texts[1] in ("abba", "bad", "cab")
    assert set(texts[2]) == {"a"} and set(texts[3]) <= set("abcdefghijklmnopqrstuvwxyz ")
    assert outputs["r4"] == [] or texts[4] == "a"


def test_a_mask_of_the_step_before_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the grammar does not advance by the tokens of the step before."""
    real = known_module.KnownTokens.advance

    def forgets(self: Any, plan: Any, tokens: Any, emitted: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(self.logits_processors, "num_active", 0)
            real(self, plan, tokens, emitted)

    monkeypatch.setattr(known_module.KnownTokens, "advance", forgets)
    with pytest.raises(Differs):
        run_twins(structured(), Pair(vocab_size=TEXTS), grammars=GRAMMARS, eos_ids=(0,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mask_forbids_what_its_bits_say(dtype: torch.dtype) -> None:
    vocab, generator = 4100, torch.Generator().manual_seed(3)
    logits = torch.randn(6, vocab, generator=generator).to(dtype)
    logits[1, 7], logits[4, 4099] = float("nan"), float("-inf")
    rows = torch.randint(-(2**31), 2**31, (5, words_of(vocab)), generator=generator).int()
    # Slot 2 has two rows from 1 on, and no third; slot 0 has one, the fourth.
    rows[:, :2] = torch.tensor([[2, 0], [2, 1], [2, 2], [0, 0], [1, 0]])
    starts, counts = torch.tensor([4, 0, 1]).int(), torch.tensor([1, 0, 2]).int()
    expected = logits.clone()
    mask_reference(expected, rows, starts, counts)
    mask_logits(logits, rows, starts, counts)
    assert torch.equal(logits.nan_to_num(nan=3.0), expected.nan_to_num(nan=3.0))
    masked = (logits == torch.finfo(dtype).min).sum(dim=1)
    assert (masked[[1, 2, 4]] > vocab // 3).all() and not masked[[0, 3, 5]].any()
