"""The GPU executor gives the results of the CPU executor, step by step, on a stream that runs
nothing before the host waits and with graphs that are tapes. With a plan in flight lookups are a
step late: then texts are equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from cbatch.core.request.request import Request, StructuredOutputs
from cbatch.grammars import Grammars
from cbatch.runtime.drafting.lookups import NgramLookup, SuffixLookup
from cbatch.runtime.gpu import device_steps
from cbatch.runtime.gpu import draft_pass as drafting
from cbatch.runtime.gpu import known_tokens as known_module
from cbatch.runtime.gpu import target_pass as verifying
from cbatch.runtime.gpu.attention import Tuning
from cbatch.runtime.gpu.decoder import Decoder
from cbatch.runtime.gpu.device_steps import DeviceSteps
from cbatch.runtime.gpu.executor import GpuExecutor
from cbatch.runtime.gpu.host_drafts import LookupSettings
from cbatch.runtime.gpu.target_pass import TargetPass
from cbatch.text import TextTokenizer
from tests.gpu_proofs.interpreted import twins as twins_module
from tests.gpu_proofs.interpreted.stream import DeviceFault, HostReads, Stream
from tests.gpu_proofs.interpreted.twins import Captures, Differs, LateTwins, Pair, Twins, run_twins
from tests.runtime.engines import make_request
from tests.text.toy_tokenizers import printable
from triton_kernels.attention import Tile
from triton_kernels.sampling.inputs import COUPLED, REJECTION, LogitsBatch

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
FP8 = torch.float8_e4m3fn
BOTH_DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def happened(seen: Counter[str], *events: str) -> None:
    missing = [event for event in events if not seen[event]]
    assert not missing, f"did not happen: {missing}, but {dict(seen)}"


def was_replayed(stream: Stream) -> None:
    assert stream.seen["captured"] > 3 and stream.seen["replayed"] > 4


def prompts(*lengths: int, **params: Any) -> list[Request]:
    return [
        make_request(f"r{i}", [(7 * i + 3 * j) % 61 for j in range(n)], **params)
        for i, n in enumerate(lengths)
    ]


@pytest.mark.parametrize("lookahead, depth, noise", [("fixed:3", 0, 0.06), ("fixed:3", 1, 0.045)])
def test_greedy_requests_come_and_go(
    stream: Stream, lookahead: str, depth: int, noise: float
) -> None:
    outputs, seen = run_twins(
        prompts(23, 5, 30, 12, max_tokens=8),
        Pair(),
        Pair(noise=noise),
        lookahead=lookahead,
        depth=depth,
        arrivals=[0, 0, 1, 5],
        max_num_seqs=3,
        max_num_batched_tokens=20,
    )
    assert {len(tokens) for tokens in outputs.values()} == {8}
    happened(seen, "unfinished chunks", "slots used again", "accepted", "all accepted", "rejected")
    happened(seen, "mixed steps", "ragged k", "catch-ups", "slices")
    if depth:
        happened(seen, "plans in flight", "void rows", "drafted fewer")
    was_replayed(stream)


@BOTH_DEPTHS
def test_preempted_and_cancelled_requests(stream: Stream, depth: int) -> None:
    outputs, seen = run_twins(
        prompts(14, 13, 12, 9, max_tokens=22),
        Pair(),
        Pair(noise=0.05),
        lookahead="fixed:2",
        depth=depth,
        num_blocks=6,
        max_num_batched_tokens=48,
        cancels={"r1": 6},
    )
    assert len(outputs["r1"]) < 22 == len(outputs["r0"])
    happened(seen, "preemptions", "resumed", "slots used again", "accepted", "rejected")
    was_replayed(stream)


SAMPLED: list[dict[str, Any]] = [
    {"verification": "coupled"},
    {"verification": "rejection"},
    {"verification": "rejection", "top_k": 12, "top_p": 0.9, "frequency_penalty": 0.4},
    {"verification": "coupled", "min_p": 0.02, "min_tokens": 6, "stop_token_ids": (22, 12)},
    {"temperature": 0.0, "repetition_penalty": 1.4, "logit_bias": {7: 3.0, 9: -4.0}},
    {"verification": "rejection", "allowed_token_ids": tuple(range(0, 64, 2))},
    {"banned_token_ids": (46, 38), "presence_penalty": 1.0, "max_lookahead": 0},
]


def sampled_requests() -> list[Request]:
    return [
        make_request(
            f"r{i}", range(5 + i, 10 + 2 * i), **{"temperature": 0.8, "max_tokens": 7, **params}
        )
        for i, params in enumerate(SAMPLED)
    ]


@BOTH_DEPTHS
def test_sampled_and_shaped_requests(stream: Stream, depth: int) -> None:
    outputs, seen = run_twins(
        sampled_requests(),
        Pair(),
        Pair(noise=0.05),
        lookahead="fixed:3",
        depth=depth,
        max_num_batched_tokens=48,
    )
    happened(seen, "slots used again", "accepted", "rejected", "all accepted", "ragged k")
    assert all(token % 2 == 0 for token in outputs["r5"])
    assert not {46, 38} & set(outputs["r6"])
    was_replayed(stream)


# Padding rows of the attention output are uninitialised; no request reads what becomes of them.
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.usefixtures("bare_stream")
def test_all_kernels_together() -> None:
    """No kernel is replaced: a window, norms of queries and keys, biases, keys in two splits."""
    more: dict[str, Any] = {"model_type": "qwen3", "num_key_value_heads": 1}
    more |= {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    biases = {"attention_bias": True, "mlp_bias": True}
    rejection = {"temperature": 0.7, "verification": "rejection"}
    requests = [
        make_request("greedy", range(5, 19), max_tokens=4),
        make_request("rejection", range(9, 12), max_tokens=3, **rejection),
    ]
    _, seen = run_twins(
        requests,
        Pair(**more, **biases),
        Pair(noise=0.03, **more, **biases),
        lookahead="fixed:2",
        arrivals=[0, 1],
        max_num_seqs=2,
        tuning=Tuning(Tile(16, 16, 4, 2), 2, 4, split_tokens=16),
    )
    happened(seen, "accepted", "mixed steps")


@pytest.mark.usefixtures("stream")
def test_a_smaller_draft_and_a_shorter_context() -> None:
    """The draft has fewer tokens than the target, and no positions beyond 24."""
    _, seen = run_twins(
        prompts(12, 20, max_tokens=9),
        Pair(),
        Pair(noise=0.05, vocab_size=50, max_position_tokens=24),
        lookahead="fixed:3",
    )
    happened(seen, "drafted", "rejected")


def poisoned(draft: int, sound: int, later: int) -> list[Request]:
    """Return requests that reach token 60, which breaks the target, and 59, which breaks the draft;
    and others of the given length."""
    return [
        make_request("target", [3, 60, 4], max_tokens=6),
        make_request("draft", [5, 59, 6], max_tokens=draft),
        make_request("sound", [7, 8, 9], max_tokens=sound),
        make_request("later", range(20, 30), max_tokens=later),
    ]


@BOTH_DEPTHS
def test_faults_and_values_that_are_not_finite(
    stream: Stream, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request ends with an error, the second continues without drafts, the others are
    unaffected. Slots and blocks are used again. Twice a step fails after it was queued."""
    real, steps = GpuExecutor.decide, iter(range(1000))

    def failing(executor: GpuExecutor, step: Any) -> None:
        real(executor, step)
        if next(steps) in (3, 8):
            raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(GpuExecutor, "decide", failing)
    outputs, seen = run_twins(
        poisoned(9, 9, 9),
        Pair(poison=60),
        Pair(noise=0.05, poison=59),
        lookahead="fixed:2",
        depth=depth,
        num_blocks=4,
        max_num_seqs=3,
        num_faults=2,
    )
    assert outputs["target"] == []
    assert [len(outputs[name]) for name in ("draft", "sound", "later")] == [9, 9, 9]
    happened(seen, "target not finite", "draft not finite", "blocks zeroed", "accepted", "resumed")
    was_replayed(stream)


@pytest.mark.usefixtures("stream")
@BOTH_DEPTHS
def test_a_draft_that_breaks_on_what_it_drew(depth: int) -> None:
    """Tokens drawn before the break count; the KV after them does not."""
    requests = [
        make_request(f"r{i}", range(5 + i, 10 + i), max_tokens=7, temperature=temperature)
        for i, temperature in enumerate([0.0, 0.9, 1.2, 0.0])
    ]
    _, seen = run_twins(
        requests, Pair(), Pair(noise=0.05, poison=46), lookahead="fixed:3", depth=depth
    )
    happened(seen, "draft not finite", "drafts before a break", "accepted", "rejected")


@BOTH_DEPTHS
def test_log_probabilities(stream: Stream, depth: int) -> None:
    asks = {"temperature": 0.7, "top_k": 9, "logprobs": 2, "logprobs_mode": "processed"}
    requests = [
        make_request("raw", range(4, 10), max_tokens=4, logprobs=3),
        make_request("processed", range(8, 12), max_tokens=4, presence_penalty=0.6, **asks),
        make_request("prompt", range(20, 44), max_tokens=2, prompt_logprobs=2),
    ]
    _, seen = run_twins(
        requests,
        Pair(),
        Pair(noise=0.05),
        lookahead="fixed:2",
        depth=depth,
        max_num_batched_tokens=16,
    )
    happened(seen, "accepted", "unfinished chunks")
    assert seen["log probabilities"] == 4 + 4 + 23
    assert not stream.seen["reads"], "the host never waits"


@pytest.mark.usefixtures("stream")
def test_invariant_numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twins_module, "Decoder", partial(Decoder, numerics="invariant"))
    target, draft = Pair(), Pair(noise=0.05)
    assert target.decoder.numerics == "invariant" and target.decoder.keeps_bits()
    _, seen = run_twins(prompts(12, 5, max_tokens=4), target, draft, lookahead="fixed:2")
    happened(seen, "accepted", "drafted")


@pytest.mark.usefixtures("stream")
def test_keys_in_fp8_are_scaled_and_text_does_not_follow_the_batch() -> None:
    scales = (0.5, 0.25)

    def run(kv_dtype: Any, lookahead: str, slots: int) -> tuple[dict[str, list[int]], Any]:
        kept: list[GpuExecutor] = []

        class Kind(LateTwins):
            @staticmethod
            def _gpu_executor(*given: Any) -> GpuExecutor:
                *rest, settings = given
                rest[0].decoder.kv_scales = [scales] * rest[0].config.num_layers
                kept.append(LateTwins._gpu_executor(*rest, settings | {"kv_dtype": kv_dtype}))
                return kept[-1]

        outputs, _ = run_twins(
            prompts(23, 5, 12, max_tokens=6),
            Pair(),
            Pair(noise=0.04) if lookahead != "off" else None,
            lookahead=lookahead,
            max_num_seqs=slots,
            max_num_batched_tokens=20,
            twins_kind=Kind,
        )
        return outputs, kept[0].kv.data

    _, exact = run(None, "off", 1)
    alone, small = run(FP8, "off", 1)
    together, _ = run(FP8, "fixed:3", 3)
    assert alone == together
    assert small.dtype == FP8 and small.nbytes * 4 == exact.nbytes
    # The first layer's output for the first prompt does not depend on stored keys and values.
    for half, scale in enumerate(scales):
        unscaled = exact[0, half, :, 0]
        assert unscaled.abs().max() > 0
        assert torch.equal((unscaled / scale).to(FP8).float(), small[0, half, :, 0].float())


# --- lookups and grammars, which run on the host --------------------------------------------------

VOCAB = 12  # so few that greedy text repeats itself
VOCABULARY = TextTokenizer(printable(), "toy")
TEXTS = VOCABULARY.vocab_size
GRAMMARS = Grammars(lambda: VOCABULARY, TEXTS, (0,))


def settings_of(*default: str) -> LookupSettings:
    lookups = {"ngram": NgramLookup(), "suffix": SuffixLookup()}
    return LookupSettings(lookups, default)


def chained(**params: Any) -> list[Request]:
    """Return requests with chains, and one with the default chain; all repeat themselves soon."""
    chains: list[Any] = [("ngram",), ("suffix",), None]
    chains += [("ngram", "model"), ("model", "suffix"), ("model",)]
    return [
        make_request(f"r{i}", [1, 5, 3, 1, 5, 3, i], drafter=chain, **params)
        for i, chain in enumerate(chains)
    ]


def run_chains(
    requests: list[Request], model: bool = True, **more: Any
) -> tuple[dict[str, list[int]], Counter[str]]:
    return run_twins(
        requests,
        Pair(vocab_size=VOCAB),
        Pair(noise=0.08, vocab_size=VOCAB) if model else None,
        lookups=settings_of("suffix", "model") if model else settings_of("suffix"),
        lookahead="fixed:3",
        **more,
    )


def test_chains_draft_what_they_do_on_a_cpu(stream: Stream) -> None:
    outputs, seen = run_chains(chained(max_tokens=14))
    assert {len(tokens) for tokens in outputs.values()} == {14}
    happened(seen, "accepted", "rejected", "all accepted", "slots used again", "catch-ups")
    was_replayed(stream)


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("model", [True, False])
def test_lookup_drafts_are_verified_as_on_a_cpu(model: bool) -> None:
    sampled = {"temperature": 0.3, "max_tokens": 8}
    laws, names = ("rejection", "coupled"), ("suffix", "model")[: 1 + model]
    requests = [
        make_request(
            f"{law} {name}", [1, 5, 3, 1, 5, 3, 2], drafter=(name,), verification=law, **sampled
        )
        for law in laws
        for name in names
    ]
    _, seen = run_chains(requests, model)
    happened(seen, "accepted", "rejected")


def test_late_drafts_leave_the_text_as_it_is(stream: Stream) -> None:
    """Text of few words repeats itself: most guesses of the step before are accepted."""
    requests = chained(max_tokens=14)
    plain, _ = run_twins(requests, Pair(vocab_size=VOCAB), max_num_seqs=6)
    outputs, seen = run_chains(requests, depth=1, twins_kind=LateTwins)
    assert outputs == plain
    happened(seen, "plans in flight", "accepted", "rejected", "drafted fewer", "slots used again")
    was_replayed(stream)


STRUCTURED: list[dict[str, Any]] = [
    {"structured_outputs": StructuredOutputs(regex="[ab]{2,4}(cd)*e")},
    {"structured_outputs": StructuredOutputs(choice=("abba", "bad", "cab"))},
    {"structured_outputs": StructuredOutputs(regex="a+"), "min_tokens": 4, "logit_bias": {5: 1.0}},
    {"structured_outputs": StructuredOutputs(regex="[a-z ]*"), "temperature": 0.9, "logprobs": 2},
    {
        "structured_outputs": StructuredOutputs(regex="ab"),
        "banned_token_ids": tuple(i for i in range(TEXTS) if "b" in VOCABULARY.decode([i])),
    },
    {},
]


def run_structured(drafts: bool, **more: Any) -> tuple[dict[str, list[int]], Counter[str]]:
    """Run a request of each kind, one that reaches a dead end, and one without a grammar."""
    prompt, usual = VOCABULARY.encode("ab ab ab"), {"max_tokens": 7, "ignore_eos": False}
    return run_twins(
        [make_request(f"r{i}", prompt, **usual | each) for i, each in enumerate(STRUCTURED)],
        Pair(vocab_size=TEXTS),
        lookups=settings_of("suffix") if drafts else None,
        grammars=GRAMMARS,
        lookahead="fixed:3" if drafts else "off",
        eos_ids=(0,),
        max_num_batched_tokens=40,
        **more,
    )


@pytest.mark.parametrize("depth, drafts", [(0, True), (1, False), (1, True)])
def test_outputs_follow_their_grammars(stream: Stream, depth: int, drafts: bool) -> None:
    kind = LateTwins if drafts and depth else Twins
    outputs, seen = run_structured(drafts, depth=depth, twins_kind=kind)
    happened(seen, "no token", *(["plans in flight"] if depth else []))
    texts = [VOCABULARY.decode([t for t in outputs[f"r{i}"] if t]) for i in range(6)]
    assert texts[0][:2].strip("ab") == "" and texts[1] in ("abba", "bad", "cab")
    assert set(texts[2]) == {"a"} and set(texts[3]) <= set("abcdefghijklmnopqrstuvwxyz ")
    assert outputs["r4"] == [] or texts[4] == "a"
    was_replayed(stream)


# --- planted faults -------------------------------------------------------------------------------


def all_accepted(
    real: Any, state: Any, layout: Any, decision: Any, *rest: Any, **more: Any
) -> None:
    """Broken: every draft counts as accepted."""
    if decision is not None:
        decision = decision._replace(num_accepted=layout.num_drafted)
    real(state, layout, decision, *rest, **more)


def noise_of_its_own(real: Any, batch: LogitsBatch, purpose: int, **more: Any) -> None:
    """Broken: coupled requests draft with other noise than they are verified with."""
    modes = torch.where(batch.requests.modes == COUPLED, REJECTION, batch.requests.modes)
    real(batch._replace(requests=batch.requests._replace(modes=modes)), purpose, **more)


def reading(real: Any, state: Any, layout: Any, *rest: Any, **more: Any) -> None:
    """Broken: the host reads how many tokens were drafted."""
    int(layout.num_drafted.sum())
    real(state, layout, *rest, **more)


def one_message(real: Any, executor: Any, message: Any, buffers: Any) -> None:
    """Broken: all messages are written to the same memory."""
    buffers.message = executor.__dict__.setdefault("_only", torch.zeros(9999, dtype=torch.int32))
    real(executor, message, buffers)


def moved_result(real: Any, target: Any, *arguments: Any) -> None:
    """Broken: memory that graphs use moves in every step."""
    target.result = torch.zeros_like(target.result)
    real(target, *arguments)


def key_without_tokens(real: Any, device: Any, key: Any, function: Any) -> None:
    """Broken: one graph for steps of all numbers of tokens."""
    real(device, key[:1] if key[0] == "target" else key, function)


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize(
    "owner, name, broken, raised",
    [
        (verifying, "advance", all_accepted, Differs),
        (drafting, "draw", noise_of_its_own, Differs),
        (verifying, "advance", reading, HostReads),
        (DeviceSteps, "send", one_message, Differs),
        (TargetPass, "decide", moved_result, Differs),
        (Captures, "run", key_without_tokens, (Differs, DeviceFault)),
    ],
)
def test_planted_faults_are_caught(
    owner: Any, name: str, broken: Any, raised: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **more: broken(real, *args, **more))
    requests = [
        make_request("plain", range(4, 9), max_tokens=9),
        make_request("shaped", range(9, 12), max_tokens=9, frequency_penalty=2.0),
        make_request("coupled", range(2, 9), max_tokens=9, temperature=1.0, verification="coupled"),
        make_request("later", range(30, 50), max_tokens=9, min_tokens=2),
    ]
    with pytest.raises(raised):
        run_twins(
            requests,
            Pair(),
            Pair(noise=0.06),
            lookahead="fixed:3",
            depth=1,
            arrivals=[0, 2, 1, 4],
        )


def guesses_of_another_place(patch: pytest.MonkeyPatch) -> None:
    """Broken: guesses are not advanced by the tokens emitted since."""
    real = device_steps.take_guesses

    def unmoved(state: Any, layout: Any, **more: Any) -> None:
        state.guess[:, 1] -= 1
        real(state, layout, **more)

    patch.setattr(device_steps, "take_guesses", unmoved)


def forgotten_tokens(patch: pytest.MonkeyPatch) -> None:
    """Broken: the grammar does not advance by the tokens of the step before."""
    real = known_module.KnownTokens.advance

    def forgets(self: Any, *given: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self.logits_processors, "num_active", 0)
            real(self, *given)

    patch.setattr(known_module.KnownTokens, "advance", forgets)


def drafts_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """Broken: the grammar checks drafts before they have come."""
    decide = GpuExecutor.decide

    def deciding(executor: GpuExecutor, step: Any) -> None:
        if step.drafting is not None:
            patch.setattr(step.drafting[1], "wait", lambda: None)
        decide(executor, step)

    patch.setattr(GpuExecutor, "decide", deciding)


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize(
    "run, plant",
    [
        (partial(run_chains, chained(max_tokens=8)), guesses_of_another_place),
        (partial(run_structured, True), forgotten_tokens),
        (partial(run_structured, True), drafts_not_waited_for),
    ],
)
def test_planted_faults_of_the_host_side_are_caught(
    run: Callable[[], Any], plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((Differs, DeviceFault)):
        run()
