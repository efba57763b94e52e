"""Layer profiles: interpolation by hand, reading profiles, and the predicted run."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import sim.cost.layer_profiles
from bench.simulator import against_vllm as simulator_vllm
from cbatch.core.prices.step_work import StepWork
from cbatch.core.request.errors import FieldError
from sim.cost.curve import Curve
from sim.cost.layer_profiles import Grid, LayerProfile
from tests.helpers import decoding, prefilling

MEASURED = Path(__file__).parents[3] / "shared" / "data" / "measured"
LAYERS = 3
CHUNKS, HISTORIES, ROWS, CONTEXTS = (16, 64), (0, 32), (1, 4), (16, 64, 256)
SKEW = ("pc", "n_label", "skew_rate_label", "kv_big_label", "kp_label", "alpha", "n_samples")


def write(path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


def attention_us(chunk: float, history: float, rows: float, context: float) -> float:
    """Return a time that is linear on every axis except for the product of rows and context, as
    interpolation is. A batch with chunk and rows costs 7 more."""
    both = 7.0 if chunk and rows else 0.0
    return 0.5 * chunk + 0.01 * chunk * history + 0.1 * rows * context + both


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write profiles of kernels whose times are known in closed form."""
    per_block = ("layernorm", "qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn")
    dense = [(name, n, 1.0 + n) for name in (*per_block, "down_proj") for n in (1, 8, 64)]
    dense += [(name, n, 100.0) for name in ("embedding", "final_layernorm") for n in (1, 64)]
    write(tmp_path / "dense.csv", ("layer", "tokens", "time_us"), dense)
    heads = [(name, n, 10.0 * n) for name in ("lm_head", "sampler") for n in (1, 8)]
    write(tmp_path / "per_sequence.csv", ("layer", "sequences", "time_us"), heads)
    points = [(0, 0, n, kv) for n, kv in itertools.product(ROWS, CONTEXTS)]
    points += [(c, h, 0, 0) for c, h in itertools.product(CHUNKS, HISTORIES)]
    points += list(itertools.product(CHUNKS, HISTORIES, ROWS, CONTEXTS))
    points += [(32, 32, 1, 64)]  # at another spacing, and not to the shortest context
    rows = [(*point, attention_us(*point)) for point in points]
    columns = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    write(tmp_path / "attention.csv", columns, rows)
    return tmp_path


def step_s(tokens: int, logits: int, attention_us: float) -> float:
    return (LAYERS * 8 * (1 + tokens) + 200 + 20 * logits + LAYERS * attention_us) * 1e-6


def uneven(*contexts: int) -> StepWork:
    """Return rows that decode, each with its own context."""
    return decoding(
        len(contexts),
        sum(contexts),
        decode_longest_tokens=max(contexts),
        decode_shortest_tokens=min(contexts),
    )


def in_one_step(chunk: StepWork, decodes: StepWork) -> StepWork:
    """Return both in one step."""
    summed = {
        name: getattr(chunk, name) + getattr(decodes, name) for name in chunk.__struct_fields__
    }
    return msgspec.structs.replace(decodes, **summed)


def test_curves_run_straight_between_points_and_on_beyond() -> None:
    curve = Curve([8, 1, 4], [16.0, 2.0, 4.0])
    assert [curve(n) for n in (0, 1, 2, 4, 6, 8, 10)] == pytest.approx([2, 2, 8 / 3, 4, 10, 16, 22])
    total = Curve.total([(2, curve), (1, Curve([1, 5], [1.0, 5.0]))])
    assert total.max_count == 5 and total(3) == pytest.approx(2 * (10 / 3) + 3)


def test_grids_are_exact_for_multilinear_functions() -> None:
    def f(x: float, y: float, z: float) -> float:
        return 2 + x * y - 3 * y * z + 0.5 * x * y * z

    axes = [[0.0, 1.0, 4.0], [1.0, 2.0], [0.0, 3.0, 9.0]]
    values = np.array([[[f(x, y, z) for z in axes[2]] for y in axes[1]] for x in axes[0]])
    grid, rng = Grid(axes, values), np.random.default_rng(0)
    for x, y, z in rng.uniform(-1, 12, (50, 3)):  # beyond the ends, too
        assert grid(x, y, z) == pytest.approx(f(x, y, z))


@pytest.mark.parametrize(
    ("work", "tokens", "logits", "attention"),
    [
        (uneven(40, 100), 2, 2, (0, 0, 2, 70)),
        (prefilling(1, 40, history=20), 40, 1, (40, 20, 0, 0)),
        # A chunk together with decoding rows is one launch.
        (in_one_step(prefilling(1, 40, history=20), uneven(50, 50, 50)), 43, 4, (40, 20, 3, 50)),
        # Several prompts are one chunk of as many pairs.
        (prefilling(4, 25), 100, 4, ((4 * 25 * 26) ** 0.5, 0, 0, 0)),
    ],
    ids=["decodes", "chunk", "both", "prompts"],
)
def test_steps_are_sums_of_their_kernels(
    folder: Path, work: StepWork, tokens: int, logits: int, attention: tuple[float, ...]
) -> None:
    cost = LayerProfile(folder, layers=LAYERS)
    expected_s = step_s(tokens, logits, attention_us(*attention))
    assert cost.step_s(work) == (0.0, pytest.approx(expected_s), 0.0)


def test_uneven_contexts_cost_what_the_skew_says(folder: Path) -> None:
    buckets = [
        (0, "n<=4", "sr<=50%", "kvB<=1k", "kp=0", 0.25, 3),
        (0, "n<=4", "sr>50%", "kvB<=1k", "kp=0", 0.75, 1),
        (0, "n>4", "sr>50%", "kvB>1k", "kp>0", 1, 4),
    ]
    write(folder / "skew_fit.csv", SKEW, buckets)
    cost = LayerProfile(folder, layers=LAYERS)
    for contexts, share in (
        ((20, 20, 20, 200), 0.25),
        ((20, 200, 200, 200), 0.75),
        ((50, 50, 50, 50), 0.0),
        # A bucket without measurements gets the mean of its chunk's, weighted by samples.
        ((20, 20, 20, 2000), 5.5 / 8),
    ):
        mean_us, max_us = (attention_us(0, 0, 4, c) for c in (sum(contexts) / 4, max(contexts)))
        expected_s = step_s(4, 4, mean_us + share * (max_us - mean_us))
        assert cost.step_s(uneven(*contexts))[1] == pytest.approx(expected_s)


def _edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / "dense.csv").unlink(), "dense.csv"),
        (_edit("dense.csv", "act_fn,1,", "act,1,"), "dense.csv, line"),
        (_edit("dense.csv", "act_fn,8,9.0", "act_fn,8,0"), "is not positive"),
        (_edit("dense.csv", "act_fn,8,9.0", "act_fn,8,nan"), "not a finite number"),
        (_edit("per_sequence.csv", "sampler,8,80.0\n", ""), "too few points of sampler"),
        (_edit("attention.csv", "0,0,4,64,", "0,0,4,65,"), "lacks n_decode 1, kv_decode 65"),
        (_edit("attention.csv", "16,32,4,64,", "16,32,5,64,"), "attention.csv lacks"),
        (
            lambda f: write(
                f / "skew_fit.csv", SKEW, [(0, "few", "sr<=5%", "kvB<=1k", "kp=0", 0.1, 1)]
            ),
            "line 2: n_label: 'few' is not a bucket",
        ),
    ],
)
def test_bad_profiles_name_their_place(
    folder: Path, change: Callable[[Path], None], words: str
) -> None:
    change(folder)
    with pytest.raises(FieldError, match=words):
        LayerProfile(folder, layers=1)


# -- a real run


def errors() -> dict[str, float]:
    """Return the errors of the means, as the benchmark prints them."""
    run = MEASURED / "vllm_runs" / simulator_vllm.RUN
    simulated, _ = simulator_vllm.simulated(MEASURED, run, 33_000)
    rows = simulator_vllm.compare(simulator_vllm.measured(run / "requests.jsonl"), simulated)
    return {row["measure"]: row["error"] for row in rows if row["cut"] == "mean"}


@pytest.mark.shared_data
def test_a_real_vllm_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The errors are within the required bounds. They are not if attention costs the same for any
    contexts of the rows."""
    if not MEASURED.is_dir():
        pytest.skip(f"{MEASURED} is absent")
    bounds = {"ttft_ms": 0.03, "tpot_ms": 0.02, "e2e_ms": 0.03}
    actual = errors()
    assert all(abs(actual[name]) <= bound for name, bound in bounds.items())
    monkeypatch.setattr(sim.cost.layer_profiles.Skew, "share", lambda *_: 0.0)
    assert abs(errors()["tpot_ms"]) > bounds["tpot_ms"]
