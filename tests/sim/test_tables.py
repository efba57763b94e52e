"""Tables of kernel times: interpolation by hand, reading profiles, and the run they foretell."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sim.layer_profiles
from bench import simulator_vllm
from cbatch.core.errors import FieldError
from sim.costs import StepWork
from sim.layer_profiles import Skew, read_layer_profiles
from sim.tables import Curve, Grid, require_lattice, same_pairs_tokens

MEASURED = Path(__file__).parents[3] / "shared" / "data" / "measured"
LAYERS = 3
CHUNKS, HISTORIES, ROWS, CONTEXTS = (16, 64), (0, 32), (1, 4), (16, 64, 256)


def write(path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


def attention_us(chunk: int, history: int, rows: int, context: int) -> float:
    """Linear on every axis but for the product of rows and context, as interpolation is: and a
    batch that holds both costs 7 more."""
    both = 7.0 if chunk and rows else 0.0
    return 0.5 * chunk + 0.01 * chunk * history + 0.1 * rows * context + both


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Profiles of kernels whose times are known in closed form."""
    per_block = ("layernorm", "qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn")
    dense = [(name, n, 1.0 + n) for name in (*per_block, "down_proj") for n in (1, 8, 64)]
    dense += [(name, n, 100.0) for name in ("embedding", "final_layernorm") for n in (1, 64)]
    write(tmp_path / "dense.csv", ("layer", "tokens", "time_us"), dense)
    heads = [(name, n, 10.0 * n) for name in ("lm_head", "sampler") for n in (1, 8)]
    write(tmp_path / "per_sequence.csv", ("layer", "sequences", "time_us"), heads)
    points = [(0, 0, n, kv) for n, kv in itertools.product(ROWS, CONTEXTS)]
    points += [(c, h, 0, 0) for c, h in itertools.product(CHUNKS, HISTORIES)]
    points += list(itertools.product(CHUNKS, HISTORIES, ROWS, CONTEXTS))
    points += [(32, 32, 1, 64)]  # of another spacing, and not to the shortest context
    rows = [(*point, attention_us(*point)) for point in points]
    columns = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    write(tmp_path / "attention.csv", columns, rows)
    return tmp_path


def dense_s(tokens: int, logits: int) -> float:
    return (LAYERS * 8 * (1 + tokens) + 200 + 20 * logits) * 1e-6


def decoding(rows: int, contexts: Sequence[int]) -> StepWork:
    return StepWork(
        rows=rows,
        decode_rows=rows,
        decode_tokens=rows,
        logit_tokens=rows,
        decode_context_tokens=sum(contexts),
        decode_longest_tokens=max(contexts),
        decode_shortest_tokens=min(contexts),
    )


def test_curves_run_straight_between_points_and_on_beyond() -> None:
    curve = Curve([8, 1, 4], [16.0, 2.0, 4.0])
    assert [curve(n) for n in (0, 1, 2, 4, 6, 8, 10)] == pytest.approx([2, 2, 8 / 3, 4, 10, 16, 22])
    total = Curve.total([(2, curve), (1, Curve([1, 5], [1.0, 5.0]))])
    assert total.most == 5 and total(3) == pytest.approx(2 * (10 / 3) + 3)


def test_grids_are_exact_for_multilinear_functions() -> None:
    def f(x: float, y: float, z: float) -> float:
        return 2 + x * y - 3 * y * z + 0.5 * x * y * z

    axes = [[0.0, 1.0, 4.0], [1.0, 2.0], [0.0, 3.0, 9.0]]
    values = np.array([[[f(x, y, z) for z in axes[2]] for y in axes[1]] for x in axes[0]])
    grid, rng = Grid(axes, values), np.random.default_rng(0)
    for x, y, z in rng.uniform(-1, 12, (50, 3)):  # beyond the ends, too
        assert grid(x, y, z) == pytest.approx(f(x, y, z))


def test_a_lattice_with_a_hole_is_refused() -> None:
    axes = {"rows": [1, 2], "context": [16, 32]}
    full = {(r, c): 1.0 for r in (1, 2) for c in (16, 32)}
    require_lattice("t", axes, full)
    del full[(2, 16)]
    with pytest.raises(FieldError, match="t lacks rows 2, context 16"):
        require_lattice("t", axes, full)
    with pytest.raises(FieldError, match="rows has one value"):
        require_lattice("t", {"rows": [1]}, {(1,): 1.0})


def test_steps_are_sums_of_their_kernels(folder: Path) -> None:
    cost = read_layer_profiles(folder, layers=LAYERS, step_host_s=1.0, request_host_s=0.5)
    draft_s, found_s, host_s = cost.step_s(decoding(2, (40, 100)))
    expected_s = dense_s(2, 2) + LAYERS * attention_us(0, 0, 2, 70) * 1e-6
    assert (draft_s, host_s) == (0.0, 1.0) and found_s == pytest.approx(expected_s)
    chunk = StepWork(
        rows=1,
        prefill_tokens=40,
        logit_tokens=1,
        prefill_context_tokens=60,
        prefill_pairs=40 * 20 + 40 * 41 // 2,
        admitted=1,
    )
    _, found_s, host_s = cost.step_s(chunk)
    expected_s = dense_s(40, 1) + LAYERS * attention_us(40, 20, 0, 0) * 1e-6
    assert host_s == 1.5 and found_s == pytest.approx(expected_s)


def test_a_chunk_beside_decoding_rows_is_one_launch(folder: Path) -> None:
    mixed = StepWork(
        rows=4,
        decode_rows=3,
        decode_tokens=3,
        prefill_tokens=40,
        logit_tokens=4,
        decode_context_tokens=3 * 50,
        decode_longest_tokens=50,
        decode_shortest_tokens=50,
        prefill_pairs=40 * 20 + 40 * 41 // 2,
    )
    found_s = read_layer_profiles(folder, layers=LAYERS).step_s(mixed)[1]
    expected_s = dense_s(43, 4) + LAYERS * attention_us(40, 20, 3, 50) * 1e-6
    assert found_s == pytest.approx(expected_s)


def test_several_prompts_are_one_chunk_of_as_many_pairs() -> None:
    work = StepWork(prefill_tokens=100, prefill_pairs=4 * 25 * 26 // 2)
    tokens, history_tokens = same_pairs_tokens(work)
    assert history_tokens == 0 and tokens**2 / 2 == pytest.approx(work.prefill_pairs)
    assert same_pairs_tokens(StepWork(prefill_tokens=10, prefill_pairs=10 * 7 + 55)) == (10, 7)


def test_uneven_contexts_cost_what_the_skew_says(folder: Path) -> None:
    columns = ("pc", "n_label", "skew_rate_label", "kv_big_label", "kp_label", "alpha", "n_samples")
    buckets = [(0, "n<=4", "sr<=50%", "kvB<=1k", "kp=0", 0.25, 3),
               (0, "n<=4", "sr>50%", "kvB<=1k", "kp=0", 0.75, 1)]  # fmt: skip
    write(folder / "skew_fit.csv", columns, buckets)
    cost = read_layer_profiles(folder, layers=LAYERS)
    for contexts, share in (((20, 20, 20, 200), 0.25), ((20, 200, 200, 200), 0.75)):
        mean_us, most_us = (attention_us(0, 0, 4, c) for c in (sum(contexts) / 4, max(contexts)))
        expected_s = dense_s(4, 4) + LAYERS * (mean_us + share * (most_us - mean_us)) * 1e-6
        assert cost.step_s(decoding(4, contexts))[1] == pytest.approx(expected_s)
    even = cost.step_s(decoding(4, (50, 50, 50, 50)))[1]
    assert even == pytest.approx(dense_s(4, 4) + LAYERS * attention_us(0, 0, 4, 50) * 1e-6)
    # A bucket that nobody measured: the mean of its chunk's, by samples.
    assert Skew(folder / "skew_fit.csv").share(0, 1, 0.9, 99, 5000) == 0.75
    write(
        folder / "skew_fit.csv", columns, [*buckets, (0, "n>4", "sr>50%", "kvB>1k", "kp>0", 1, 4)]
    )
    assert Skew(folder / "skew_fit.csv").share(3, 1, 0.1, 9999, 0) == pytest.approx(5.5 / 8)


def test_drafts_have_no_price(folder: Path) -> None:
    with pytest.raises(FieldError, match="--cost-table"):
        read_layer_profiles(folder, layers=1).step_s(StepWork(rows=1, draft_depth=1))


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
        (_edit("per_sequence.csv", "sampler,8,80.0\n", ""), "too little of sampler"),
        (_edit("attention.csv", "0,0,4,64,", "0,0,4,65,"), "attention.csv lacks"),
        (_edit("attention.csv", "16,32,4,64,", "16,32,5,64,"), "attention.csv lacks"),
    ],
)
def test_bad_profiles_name_their_place(
    folder: Path, change: Callable[[Path], None], words: str
) -> None:
    change(folder)
    with pytest.raises(FieldError, match=words):
        read_layer_profiles(folder, layers=1)


def test_labels_that_are_no_bucket_are_refused(folder: Path) -> None:
    columns = ("pc", "n_label", "skew_rate_label", "kv_big_label", "kp_label", "alpha", "n_samples")
    write(folder / "skew_fit.csv", columns, [(0, "few", "sr<=5%", "kvB<=1k", "kp=0", 0.1, 1)])
    with pytest.raises(FieldError, match="line 2: n_label: 'few' is no bucket"):
        read_layer_profiles(folder, layers=1)


# -- a real run


def errors(num_blocks: int | None = None) -> dict[str, float]:
    """Of the means, as the benchmark prints them."""
    run = MEASURED / "vllm_runs" / simulator_vllm.RUN
    ours, _ = simulator_vllm.simulated(MEASURED, run, num_blocks or 33_000, 0.0)
    rows = simulator_vllm.compare(simulator_vllm.measured(run / "requests.jsonl"), ours)
    return {row["measure"]: row["error"] for row in rows if row["cut"] == "mean"}


@pytest.mark.shared_data
def test_a_real_vllm_is_foretold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the bounds of the issue; and not any more once the pool does not match, or attention
    is taken to cost the same whatever the rows' contexts are."""
    if not MEASURED.is_dir():
        pytest.skip(f"{MEASURED} is absent")
    bounds = {"ttft_ms": 0.08, "tpot_ms": 0.02, "e2e_ms": 0.03}
    found = errors()
    assert all(abs(found[name]) <= bound for name, bound in bounds.items())
    assert errors(6000)["ttft_ms"] > 0.5
    monkeypatch.setattr(sim.layer_profiles.Skew, "share", lambda *_: 0.0)
    assert abs(errors()["tpot_ms"]) > bounds["tpot_ms"]


def test_comparison_by_hand() -> None:
    real = {name: np.array([1.0, 3.0]) for name in simulator_vllm.BOUNDS}
    ours = {name: values * 1.025 for name, values in real.items()}
    rows = {(r["measure"], r["cut"]): r for r in simulator_vllm.compare(real, ours)}
    assert rows["ttft_ms", "mean"]["vllm"] == 2000 and rows["ttft_ms", "mean"]["error"] == 0.025
    assert [rows[f"{m}_ms", "mean"]["within"] for m in ("ttft", "tpot", "e2e")] == [
        True, False, True,
    ]  # fmt: skip
    assert rows["tpot_ms", "p99"]["within"] is None and not math.isnan(
        rows["e2e_ms", "p90"]["vllm"]
    )
