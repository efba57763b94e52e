"""The GPU executor gives the results of the CPU executor, step by step, on a stream that runs
nothing before the host waits and with graphs that are tapes. With a plan in flight lookups are a
step late: then texts are equal."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from triton.runtime.errors import OutOfResources

from cbatch.core.request.request import Request, StructuredOutputs
from cbatch.grammars import Grammars
from cbatch.runtime.cpu.drafters.kinds import HEADS
from cbatch.runtime.drafting.lookup import Lookup
from cbatch.runtime.drafting.lookups import NgramLookup, SuffixLookup
from cbatch.runtime.gpu import device_steps
from cbatch.runtime.gpu import target_pass as verifying
from cbatch.runtime.gpu.attention import Tuning
from cbatch.runtime.gpu.device_steps import DeviceSteps
from cbatch.runtime.gpu.executor import GpuExecutor
from cbatch.runtime.gpu.heads import CLASSES
from cbatch.runtime.gpu.host_drafts import LookupSettings
from cbatch.runtime.gpu.target_pass import TargetPass
from cbatch.runtime.model.head_config import read_head
from cbatch.runtime.model.head_weights import HeadWeights
from cbatch.runtime.model.records import Recurrence
from cbatch.text import TextTokenizer
from tests.gpu_proofs.interpreted.stream import DeviceFault, HostWaits, Stream
from tests.gpu_proofs.interpreted.twins import Captures, Differs, LateTwins, Pair, Twins, run_twins
from tests.runtime import made_heads
from tests.runtime.engines import make_request, run_engine
from tests.text.toy_tokenizers import printable
from triton_kernels.attention import Tile

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    # Padding rows of the attention output are uninitialised; no request reads what they become.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
FP8 = torch.float8_e4m3fn


def happened(seen: Counter[str], *events: str) -> None:
    missing = [event for event in events if not seen[event]]
    assert not missing, f"did not happen: {missing}, but {dict(seen)}"


def prompts(*lengths: int, **params: Any) -> list[Request]:
    return [
        make_request(f"r{i}", [(7 * i + 3 * j) % 61 for j in range(n)], **params)
        for i, n in enumerate(lengths)
    ]


def sampled(*params: dict[str, Any], **more: Any) -> list[Request]:
    return [
        make_request(f"r{i}", range(5 + i, 10 + 2 * i), **{"temperature": 0.8} | more | each)
        for i, each in enumerate(params)
    ]


SAMPLED: list[dict[str, Any]] = [
    {"verification": "coupled"},
    {"verification": "rejection"},
    {"verification": "rejection", "top_k": 12, "top_p": 0.9, "frequency_penalty": 0.4},
    {"verification": "coupled", "min_p": 0.02, "min_tokens": 6, "stop_token_ids": (22, 12)},
    {"temperature": 0.0, "repetition_penalty": 1.4, "logit_bias": {7: 3.0, 9: -4.0}},
    {"verification": "rejection", "allowed_token_ids": tuple(range(0, 64, 2))},
    {"banned_token_ids": (46, 38), "presence_penalty": 1.0, "max_lookahead": 0},
]
LOGPROBS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 3},
    {"top_k": 9, "logprobs": 2, "logprobs_mode": "processed", "presence_penalty": 0.6},
    {"temperature": 0.0, "prompt_logprobs": 2},
]


class Scenario(NamedTuple):
    requests: list[Request]
    settings: dict[str, Any]
    draft: dict[str, Any] | str  # changes of a draft model, or the kind of a head
    events: str  # that occur, at any depth


TIGHT = {"max_num_seqs": 3, "max_num_batched_tokens": 20}
SHARED = [(11 * j) % 61 for j in range(33)]
HOT: dict[str, Any] = {"temperature": 3.0, "verification": "rejection", "max_tokens": 6}
WITH_HEAD = Scenario(
    [
        *prompts(23, 1, **HOT),
        *(make_request(f"shared {i}", [*SHARED, i], **HOT) for i in range(2)),
    ],
    {"k": 3, "arrivals": [0, 1, 0, 8], **TIGHT},
    "",
    "accepted, rejected, unfinished chunks, mixed steps, prefix hits",
)
SCENARIOS = {
    "greedy requests come and go": Scenario(
        prompts(23, 5, 30, 12, max_tokens=8),
        {"k": 3, "arrivals": [0, 0, 1, 5], **TIGHT},
        {"noise": 0.06},
        "unfinished chunks, accepted, all accepted, rejected, mixed steps, catch-ups",
    ),
    "preempted and cancelled": Scenario(
        prompts(14, 13, 12, 9, max_tokens=22),
        {"k": 2, "num_blocks": 6, "max_num_batched_tokens": 48, "cancels": {"r1": 6}},
        {"noise": 0.05},
        "preemptions, resumed, accepted, rejected",
    ),
    "sampled and shaped": Scenario(
        sampled(*SAMPLED, max_tokens=7),
        {"k": 3, "max_num_batched_tokens": 48},
        {"noise": 0.05},
        "accepted, rejected, all accepted",
    ),
    "a draft that breaks on what it drew": Scenario(
        [
            make_request(f"r{i}", range(5 + i, 10 + i), max_tokens=7, temperature=temperature)
            for i, temperature in enumerate([0.0, 0.9, 1.2, 0.0])
        ],
        {"k": 3},
        {"noise": 0.05, "poison": 46},
        "DRAFT_NON_FINITE, accepted, rejected",
    ),
    "log probabilities": Scenario(
        [*sampled(*LOGPROBS, max_tokens=4), make_request("r3", range(20, 44), prompt_logprobs=1)],
        {"k": 2, "max_num_batched_tokens": 16},
        {"noise": 0.05},
        "accepted, unfinished chunks, log probabilities",
    ),
    "a smaller draft with a shorter context": Scenario(
        prompts(12, 20, max_tokens=9),
        {"k": 3},
        {"noise": 0.05, "vocab_size": 50, "context": 24},
        "accepted, rejected",
    ),
    **{kind: WITH_HEAD._replace(draft=kind) for kind in CLASSES},
}


class HeadPair:
    """A head for either executor, with random weights."""

    def __init__(self, folder: Path, target: Pair, kind: str) -> None:
        made, fields = made_heads, made_heads.llama_fields()
        tensors = made.eagle1_tensors() if kind == "eagle" else made.medusa_tensors()
        if kind == "eagle3":
            fields, tensors = made.eagle3_config(), made.eagle3_tensors()
        made.write_head(folder, made.medusa_config() if kind == "medusa" else fields, tensors)
        weights, config = HeadWeights.of(folder), read_head(folder, target.config)[0]
        assert config.kind == kind
        arguments = config, weights
        self.model: Any = HEADS[kind](*arguments, target.model, made.target_head())
        self.decoder: Any = CLASSES[config.kind](*arguments, target.decoder, made.target_head())
        self.config = self.model.config


def run(scenario: Scenario, depth: int, folder: Path, **more: Any) -> Counter[str]:
    target, draft = Pair(), scenario.draft
    other = HeadPair(folder, target, draft) if isinstance(draft, str) else Pair(**draft)
    _, seen = run_twins(scenario.requests, target, other, depth=depth, **scenario.settings | more)
    return seen


BOTH = ("greedy requests come and go", "eagle3")
DEPTHS = [*((name, 0) for name in (*BOTH, "sampled and shaped", "medusa"))]
DEPTHS += [(name, 1) for name in SCENARIOS if (name, 0) not in DEPTHS or name in BOTH]


@pytest.mark.parametrize("name, depth", DEPTHS)
def test_captured_steps_are_those_of_the_cpu(
    name: str, depth: int, tmp_path: Path, stream: Stream
) -> None:
    seen = run(SCENARIOS[name], depth, tmp_path)
    happened(seen, *SCENARIOS[name].events.split(", "), *["plans in flight"] * depth)
    assert stream.seen["captured"] > 3 and stream.seen["replayed"] > 2
    assert not stream.seen["reads"] and stream.seen["copies to the host"]


@pytest.mark.usefixtures("bare_stream")
@pytest.mark.parametrize("head", [None, "eagle3"])
def test_all_kernels_together(
    head: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel is replaced: a window, norms of queries and keys, biases, keys in two splits, and
    our own products."""
    monkeypatch.setattr(made_heads, "DIM", 16)  # of queries, as a tile needs
    changes: dict[str, Any] = {}
    if head is None:
        changes = {"model_type": "qwen3", "num_key_value_heads": 1, "numerics": "invariant"}
        changes |= {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
        changes |= {"attention_bias": True, "mlp_bias": True}
    target = Pair(**changes)
    draft = HeadPair(tmp_path, target, head) if head else Pair(0.03, **changes)
    requests = [
        make_request("greedy", range(5, 19), max_tokens=4),
        make_request("r", range(9, 12), max_tokens=3, temperature=2.0, verification="rejection"),
    ]
    tuning = Tuning(Tile(16, 16, 4, 2), num_programs=2, max_partials=4, split_tokens=16)
    _, seen = run_twins(
        requests, target, draft, k=2, arrivals=[0, 1], max_num_seqs=2, gpu={"tuning": tuning}
    )
    happened(seen, "accepted", "mixed steps")
    assert target.decoder.keeps_bits() == (head is None)


@pytest.mark.parametrize("head", [None, "eagle3"])
def test_faults_and_values_that_are_not_finite(
    head: str | None, tmp_path: Path, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request reaches token 60, which breaks the target, and ends with an error. The
    second reaches 59, which breaks the draft, and continues without. The others are unaffected.
    Slots and blocks are used again. Twice a step fails after it was queued."""
    real, steps = GpuExecutor.finish, iter(range(1000))

    def failing(executor: GpuExecutor, step: Any) -> None:
        real(executor, step)
        if next(steps) in (2, 5):
            raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(GpuExecutor, "finish", failing)
    requests = [
        make_request("target", [3, 60, 4], max_tokens=6),
        make_request("draft", [5, 59, 6], max_tokens=6),
        make_request("sound", [7, 8, 9], max_tokens=6),
        make_request("later", range(20, 30), max_tokens=4),
    ]
    target = Pair(poison=60)
    draft: Any = HeadPair(tmp_path, target, head) if head else Pair(0.05, poison=59)
    sizes = {"num_blocks": 4, "max_num_seqs": 3}
    outputs, seen = run_twins(requests, target, draft, k=2, depth=1, num_faults=2, **sizes)
    assert outputs["target"] == []
    assert [len(outputs[name]) for name in ("draft", "sound", "later")] == [6, 6, 4]
    happened(seen, "NON_FINITE", "blocks zeroed", "resumed", *["DRAFT_NON_FINITE"] * (not head))
    assert stream.seen["replayed"] > 4


@pytest.mark.usefixtures("stream")
def test_keys_in_fp8_are_scaled_and_text_does_not_follow_the_batch() -> None:
    scales = (0.5, 0.25)

    def run(kv_dtype: Any, k: int, slots: int) -> tuple[dict[str, list[int]], Any]:
        kept, pair = [], Pair()
        pair.decoder.kv_scales = [scales] * pair.config.num_layers

        class Kept(LateTwins):
            def __init__(self, *given: Any, **more: Any) -> None:
                super().__init__(*given, **more)
                kept.append(self.gpu.kv.data)

        draft, sizes = Pair(0.04) if k else None, {"max_num_seqs": slots}
        more: dict[str, Any] = {"gpu": {"kv_dtype": kv_dtype}, "twins": Kept, **sizes}
        outputs, _ = run_twins(prompts(23, 5, 12, max_tokens=4), pair, draft, k=k, **more)
        return outputs, kept[0]

    _, exact = run(None, 0, 1)
    alone, small = run(FP8, 0, 1)
    together, _ = run(FP8, 3, 3)
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
CHAINS: list[Any] = [("ngram",), None, ("ngram", "model"), ("model", "suffix"), ("model",)]
REPEATED = [1, 5, 3, 1, 5, 3]


def chained(**params: Any) -> list[Request]:
    """Return requests with chains, and one with the default chain; all repeat themselves soon."""
    return [
        make_request(f"r{i}", [*REPEATED, i], drafter=chain, **params)
        for i, chain in enumerate(CHAINS)
    ]


def run_chains(requests: list[Request], **more: Any) -> tuple[dict[str, list[int]], Counter[str]]:
    lookups = {"ngram": NgramLookup(), "suffix": SuffixLookup()}
    default = LookupSettings(lookups, ("suffix", "model"))
    pairs = Pair(vocab_size=VOCAB), Pair(0.08, vocab_size=VOCAB)
    return run_twins(requests, *pairs, lookups=default, k=3, **more)


def test_chains_draft_what_they_do_on_a_cpu(stream: Stream) -> None:
    sampled = {"temperature": 0.3, "max_tokens": 8, "verification": "rejection"}
    drawn = [make_request(f"s{i}", [*REPEATED, 2], **sampled, drafter=(name,))
             for i, name in enumerate(("suffix", "model"))]  # fmt: skip
    _, seen = run_chains([*chained(max_tokens=10), *drawn])
    happened(seen, "accepted", "rejected", "all accepted", "catch-ups")


def test_late_drafts_leave_the_text_as_it_is(stream: Stream) -> None:
    """Text of few words repeats itself: most guesses of the step before are accepted."""
    requests = chained(max_tokens=14)
    plain, _ = run_twins(requests, Pair(vocab_size=VOCAB), max_num_seqs=6, twins=LateTwins)
    outputs, seen = run_chains(requests, depth=1, twins=LateTwins)
    assert outputs == plain
    happened(seen, "plans in flight", "accepted", "rejected", "drafted fewer")
    assert stream.seen["replayed"] > 4


class Mistaken(Lookup):
    """Drafts the rest of known texts, with a mistake at every fifth position."""

    def __init__(self, texts: list[list[int]]) -> None:
        self._texts = texts

    def guess(self, text: Any, depth: int) -> list[int]:
        own, size = text.tolist(), len(text)
        rest = next((each[size:] for each in self._texts if each[:size] == own), [])
        return [token ^ ((size + i) % 5 == 0) for i, token in enumerate(rest[:depth])]


def test_recurrent_layers_keep_the_text(stream: Stream) -> None:
    """Drafts fail around block boundaries. The pool is too small: a preempted request continues
    from its cached prefix."""
    heads: dict[str, Any] = {"heads": 2, "value_dim": 16, "key_heads": 1, "key_dim": 16}
    delta = Recurrence(rule="delta", kernel=4, norm_eps=1e-5, **heads)
    pair = Pair(vocab_size=VOCAB, recurrence=delta)
    prompts = [[i, 5, 3, 1] * 3 + [7] * (i % 2) for i in range(4)]
    requests = [make_request(f"r{i}", each, max_tokens=22) for i, each in enumerate(prompts)]
    pages = {"num_state_pages": 24, "state_interval": 1, "block_size": 16}
    alone = {"max_num_seqs": 1, "enable_prefix_caching": False}
    plain = run_engine(requests, pair.model, **alone, **pages)
    known = Mistaken([[*each.prompt, *plain.outputs[each.request_id]] for each in requests])
    lookups = LookupSettings({"ngram": known}, ("ngram",))
    late: dict[str, Any] = {"depth": 1, "twins": LateTwins}
    sizes = {"num_blocks": 5, "max_num_seqs": 3, "arrivals": [0, 0, 0, 4]}
    outputs, seen = run_twins(requests, pair, lookups=lookups, k=3, **late, **sizes, **pages)
    assert outputs == plain.outputs
    happened(seen, "accepted", "rejected", "prefix hits", "preemptions", "resumed")
    assert stream.seen["replayed"] > 4


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
        lookups=LookupSettings({"suffix": SuffixLookup()}, ("suffix",)) if drafts else None,
        grammars=GRAMMARS,
        k=3 if drafts else 0,
        eos_ids=(0,),
        max_num_batched_tokens=40,
        **more,
    )


@pytest.mark.parametrize("depth, drafts", [(0, True), (1, False), (1, True)])
def test_outputs_follow_their_grammars(stream: Stream, depth: int, drafts: bool) -> None:
    kind = LateTwins if drafts and depth else Twins
    outputs, seen = run_structured(drafts, depth=depth, twins=kind)
    happened(seen, "NO_TOKEN", *["plans in flight"] * depth)
    texts = [VOCABULARY.decode([t for t in outputs[f"r{i}"] if t]) for i in range(6)]
    assert texts[0][:2].strip("ab") == "" and texts[1] in ("abba", "bad", "cab")
    assert set(texts[2]) == {"a"} and set(texts[3]) <= set("abcdefghijklmnopqrstuvwxyz ")
    assert outputs["r4"] == [] or texts[4] == "a"
    assert stream.seen["replayed"] > 4


# --- planted faults -------------------------------------------------------------------------------


def reading(patch: pytest.MonkeyPatch) -> None:
    """Broken: the host reads how many tokens were drafted."""
    real = verifying.advance

    def advance(state: Any, layout: Any, *rest: Any, **more: Any) -> None:
        int(layout.num_drafted.sum())
        real(state, layout, *rest, **more)

    patch.setattr(verifying, "advance", advance)


def one_message(patch: pytest.MonkeyPatch) -> None:
    """Broken: all messages are written to the same memory."""
    real, memory = DeviceSteps.send, device_steps.HostBuffers().messages

    def send(steps: Any, message: Any, buffers: Any) -> None:
        buffers.messages = memory
        real(steps, message, buffers)

    patch.setattr(DeviceSteps, "send", send)


def moved_result(patch: pytest.MonkeyPatch) -> None:
    """Broken: memory that graphs use moves in every step."""
    for name in ("decide", "run_whole"):
        real = getattr(TargetPass, name)

        def moving(target: Any, *arguments: Any, real: Any = real) -> None:
            target.result = torch.zeros_like(target.result)
            real(target, *arguments)

        patch.setattr(TargetPass, name, moving)


def key_without_tokens(patch: pytest.MonkeyPatch) -> None:
    """Broken: one graph for steps of all numbers of tokens."""
    real = Captures.run

    def run(device: Any, key: Any, function: Any) -> None:
        real(device, key[:1] if key[0] in ("target", "whole") else key, function)

    patch.setattr(Captures, "run", run)


def guesses_of_another_place(patch: pytest.MonkeyPatch) -> None:
    """Broken: guesses are not advanced by the tokens emitted since."""
    real = device_steps.take_guesses

    def unmoved(state: Any, layout: Any, **more: Any) -> None:
        state.guess[:, 1] -= 1
        real(state, layout, **more)

    patch.setattr(device_steps, "take_guesses", unmoved)


PLANTED = Scenario(
    sampled({"verification": "coupled"}, {"temperature": 0.0}, {"min_tokens": 2}, max_tokens=9),
    {"k": 3, "arrivals": [0, 2, 1]},
    {"noise": 0.06},
    "",
)


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize(
    "plant, raised",
    [
        (reading, HostWaits),
        (one_message, Differs),
        (moved_result, Differs),
        (key_without_tokens, (Differs, DeviceFault)),
        (guesses_of_another_place, Differs),
    ],
)
def test_planted_faults_are_caught(
    plant: Any, raised: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(raised):
        if plant is guesses_of_another_place:
            run_chains(chained(max_tokens=8))
        else:
            run(PLANTED, 1, tmp_path)
