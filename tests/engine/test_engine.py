from __future__ import annotations

import pytest

from cbatch import FieldError, FinishReason, Output, SamplingParams
from cbatch.engine.engine import Engine
from cbatch.text.outputs import Choice
from tests.checking.invariants import check_scheduler
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
    first, second = (make_engine(seed=7).add(PROMPT).seed for _ in range(2))
    assert first == second


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
