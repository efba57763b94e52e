"""The engine, its core without text, and the progress of long work."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import msgspec
import pytest

from cbatch import (
    EngineOptions,
    FieldError,
    FinishReason,
    Output,
    SamplingParams,
    load_engine,
)
from cbatch.demo import demo_paths
from cbatch.engine import progress
from cbatch.engine.core import EngineCore, StepOutput
from cbatch.engine.engine import Engine
from cbatch.engine.progress import ProgressBar
from cbatch.text.outputs import Choice
from tests.checking.invariants import check_scheduler
from tests.helpers import make_request
from tests.toy_engine import TOKENIZER, make_engine

PROMPT = "def add(a, b):"


def run(engine: Engine) -> tuple[dict[tuple[str, int], Choice], list[Output]]:
    """Return the choices by (request, index), and all outputs. Check that each choice ends once."""
    outputs: list[Output] = []
    for _ in range(2000):
        if not engine.has_work:
            break
        outputs += engine.step()
        check_scheduler(engine.scheduler)
    assert not engine.has_work
    ended: dict[tuple[str, int], Choice] = {}
    for output in outputs:
        if output.finished is not None:
            assert (output.request_id, output.index) not in ended, "a choice ended twice"
            ended[output.request_id, output.index] = output.finished
    return ended, outputs


@pytest.mark.parametrize("depth", [0, 1])
def test_streamed_pieces_join_to_the_choice(depth: int) -> None:
    engine = make_engine(depth=depth)
    for at in range(5):
        engine.add(PROMPT, SamplingParams(max_tokens=20 + at, seed=at))
    ended, outputs = run(engine)
    assert len(ended) == 5
    for (request_id, index), choice in ended.items():
        mine = [o for o in outputs if (o.request_id, o.index) == (request_id, index)]
        assert "".join(o.text for o in mine) == choice.text
        assert sum((o.token_ids for o in mine), ()) == choice.token_ids
        assert mine[-1].finished is choice
        prompt = TOKENIZER.encode(PROMPT)[-6:]
        decoded = TOKENIZER.decode([*prompt, *choice.token_ids])
        assert decoded == TOKENIZER.decode(prompt) + choice.text
        assert choice.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("lookahead", ["off", "fixed:1", "fixed:4", "fixed:8"])
def test_a_stop_string_cuts_text_and_tokens_at_the_same_place_at_any_lookahead(
    lookahead: str, depth: int
) -> None:
    for seed in range(6):
        undisturbed = make_engine(lookahead="off")
        undisturbed.add(PROMPT, SamplingParams(max_tokens=60, seed=seed))
        whole = next(iter(run(undisturbed)[0].values()))
        stop = whole.text[20 + seed : 23 + seed]
        engine = make_engine(lookahead=lookahead, depth=depth, acceptance=0.9)
        engine.add(PROMPT, SamplingParams(max_tokens=60, seed=seed, stop=(stop,)))
        ended, outputs = run(engine)
        (choice,) = ended.values()
        assert choice.finish_reason is FinishReason.STOP
        assert choice.text == whole.text[: whole.text.index(stop)]
        assert choice.token_ids == whole.token_ids[: len(choice.token_ids)]
        assert stop in TOKENIZER.decode(choice.token_ids)
        assert stop not in TOKENIZER.decode(choice.token_ids[:-1])
        assert sum(len(o.token_ids) for o in outputs) == len(choice.token_ids)
        assert engine.stats.output_tokens == len(choice.token_ids), "later tokens are not billed"


def test_seeds_are_drawn_when_none_is_given() -> None:
    engine = make_engine()
    seeds = {engine.add(PROMPT).seed for _ in range(4)}
    assert len(seeds) == 4
    engines = [make_engine(seed=7) for _ in range(2)]
    with pytest.raises(FieldError):  # a refused request leaves no trace
        engines[1].add(PROMPT, SamplingParams(drafter=("suffix",)))
    first, second = (engine.add(PROMPT).seed for engine in engines)
    assert first == second
    # Such a seed fixes the text, too: drafts do not change sampled tokens.
    sequences = engines[0].scheduler.state.sequences.values()
    assert all(sequence.request.params.coupled for sequence in sequences) and sequences


@pytest.mark.parametrize("depth", [0, 1])
def test_cancel_ends_every_choice_once_and_frees_the_blocks(depth: int) -> None:
    engine = make_engine(depth=depth)
    engine.add(PROMPT, SamplingParams(n=2, max_tokens=50, seed=1), request_id="gone")
    engine.add(PROMPT, SamplingParams(max_tokens=20, seed=2), request_id="stays")
    early = [o for _ in range(4) for o in engine.step()]
    assert engine.cancel("gone")
    assert not engine.cancel("gone") and not engine.cancel("unknown")
    ended, outputs = run(engine)
    assert {key: c.finish_reason for key, c in ended.items()} == {
        ("gone", 0): FinishReason.CANCELLED,
        ("gone", 1): FinishReason.CANCELLED,
        ("stays", 0): FinishReason.LENGTH,
    }
    mine = [o for o in early + outputs if (o.request_id, o.index) == ("gone", 0)]
    assert "".join(o.text for o in mine) == ended["gone", 0].text
    assert len(ended["gone", 0].token_ids) > 0


def test_bad_requests_name_the_field_and_leave_no_resources() -> None:
    engine = make_engine()
    for prompt, params, field in (
        ([], None, "prompt"),
        ([10**6], None, "prompt"),
        ([-1], None, "prompt"),
        ([1, "a"], None, "prompt"),
        ([1] * 1000, None, "prompt"),
        ([1], SamplingParams(stop_token_ids=(10**6,)), "stop_token_ids"),
    ):
        with pytest.raises(FieldError) as caught:
            engine.add(prompt, params)
        assert caught.value.field == field
    assert not engine.has_work
    without = make_engine(tokenizer=None)
    with pytest.raises(FieldError, match="prompt: is text"):
        without.add("text")
    with pytest.raises(FieldError, match="stop: needs a tokenizer"):
        without.add([1], SamplingParams(stop=("x",)))
    without.add([1, 2], SamplingParams(max_tokens=3))
    ((_, choice),) = run(without)[0].items()
    assert len(choice.token_ids) == 3 and choice.text == ""


def test_speculation_is_counted_per_request() -> None:
    engine = make_engine(lookahead="fixed:3", acceptance=0.7)
    engine.add(PROMPT, SamplingParams(max_tokens=60, seed=3), request_id="drafts")
    engine.add(PROMPT, SamplingParams(max_tokens=60, seed=3, max_lookahead=0), request_id="plain")
    ended, _ = run(engine)
    drafts, plain = ended["drafts", 0].speculation, ended["plain", 0].speculation
    assert plain.k_histogram == {0: 59} and plain.mean_accepted_tokens == 1.0
    assert plain.acceptance is None
    assert max(drafts.k_histogram) == 3 and drafts.steps < 40
    assert drafts.mean_accepted_tokens == pytest.approx(59 / drafts.steps, abs=0.1)
    assert 0.5 < (drafts.acceptance or 0) < 0.9
    assert engine.stats.speculation.steps == drafts.steps + plain.steps
    assert engine.stats.output_tokens == 120


# --- the core -------------------------------------------------------------------------------------


def run_core(core: EngineCore) -> list[StepOutput]:
    steps = []
    while core.busy:
        steps.append(core.step())
        check_scheduler(core.scheduler)
    return steps


@pytest.mark.parametrize("depth", [0, 1])
def test_every_request_has_one_ending(depth: int) -> None:
    core = make_engine(depth=depth, lookahead="off").core
    for name in ("ends", "stopped", "cancelled"):
        core.add(make_request(name, [5, 6, 7], max_tokens=9))
    core.reject("rejected", FieldError("prompt", "is bad", "give another"))
    first = core.step()
    assert list(first.admitted) == ["ends", "stopped", "cancelled"] and first.times is not None
    core.finish("stopped", 1)
    core.cancel("cancelled")
    core.cancel("unknown")
    steps = [first, *run_core(core)]
    endings = [row for step in steps for row in step.rows if row.finish_reason is not None]
    assert {ending.request_id: ending.finish_reason for ending in endings} == {
        "ends": FinishReason.LENGTH,
        "stopped": FinishReason.STOP,
        "cancelled": FinishReason.CANCELLED,
        "rejected": FinishReason.ERROR,
    }
    assert len(endings) == 4
    assert ["is bad" in str(row.message) for row in first.rows if row.message] == [True]
    tokens = [
        t for step in steps for row in step.rows if row.request_id == "ends" for t in row.tokens
    ]
    assert len(tokens) == 9
    metrics = core.metrics()
    assert metrics.num_running == 0 and metrics.totals.steps == sum(
        s.times is not None for s in steps
    )
    assert metrics.step_s == pytest.approx(sum(s.times.total_s for s in steps if s.times))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(steps[-1]), type=StepOutput)
    assert sent == steps[-1]


def test_without_work_a_step_returns_nothing() -> None:
    core = make_engine().core
    assert not core.busy and core.step() == StepOutput()
    core.add(make_request("a", [5, 6, 7]))
    core.cancel("a")
    assert [row.finish_reason for row in core.step().rows] == [FinishReason.CANCELLED]
    assert core.step() == StepOutput()


def test_requests_that_can_neither_run_nor_end_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = make_engine().core
    core.add(make_request("a", [5, 6, 7]))
    monkeypatch.setattr(core.scheduler, "schedule", lambda now_s: None)
    core.reject("b", ValueError("bad"))
    assert len(core.step().rows) == 1, "what has ended comes first"
    with pytest.raises(RuntimeError, match="cannot plan"):
        core.step()


# --- progress -------------------------------------------------------------------------------------


def test_lines_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter([0.0, 0.0, 3.0, 12.0, 13.0, 30.0])  # made, entered, advanced four times
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(now))
    with ProgressBar(5, unit="batches") as bar:
        bar.advance()
        bar.advance()
        bar.advance(2, "7 tokens/s")
        bar.advance(1, "9 tokens/s")
    assert capsys.readouterr().err.splitlines() == ["2 of 5 batches", "5 of 5 batches, 9 tokens/s"]


def test_outputs_of_steps_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with ProgressBar(2, shown=False) as bar:
        bar.advance()
    assert not capsys.readouterr().err
    with ProgressBar(2) as bar:
        bar.update([Output("a", 0, "x", (1, 2))])
    assert "0 of 2 sequences, " in (output := capsys.readouterr().err) and "tokens/s" in output


@pytest.mark.parametrize("options", [{"lookahead": "off"}, {"lookahead": "fixed:2"}])
def test_an_engine_that_is_not_used_any_more_frees_its_memory(options: dict[str, Any]) -> None:
    """At once, not at the next collection of garbage: another engine may need the gigabytes."""
    load_engine(*demo_paths(), EngineOptions(num_blocks=64, **options))  # imports leave garbage
    gc.collect()
    gc.disable()
    try:
        engine = load_engine(*demo_paths(), EngineOptions(num_blocks=64, **options))[0]
        engine.add([1, 2, 3], SamplingParams(max_tokens=8))
        while engine.has_work:
            engine.step()
        cache = weakref.ref(engine.core.executor.kv)
        del engine
        assert cache() is None
    finally:
        gc.enable()
