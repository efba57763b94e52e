"""What two load testers that ran at once are compared by."""

from __future__ import annotations

import asyncio
import stat
import sys
from collections import Counter
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.clients import Run, write_prompts
from bench.clients_at_once import Seen, at_once, draw_lengths, rows_of
from tests.server.http_client import serving
from tests.toy_engine import make_engine

VLLM = """\
import json, sys, time
words = dict(zip(sys.argv[1:], sys.argv[2:]))
items = [json.loads(line) for line in open(words["--dataset-path"])]
assert sys.argv[1:3] == ["bench", "serve"] and "--save-detailed" in sys.argv
print("Initial test run completed.")
print("Starting main benchmark run...")
begin_s = time.perf_counter()
time.sleep(0.8)
starts = [begin_s + 0.015 * i for i in range(100)]
told = {"failed": FAILED, "start_times": starts, "ttfts": [0.01] * 100}
told |= {"itls": [[0.01, 0.02]] * 100, "output_lens": [4] * 100}
json.dump(told, open(words["--result-dir"] + "/" + words["--result-filename"], "w"))
"""


def client(seed: int, *, slower: float = 1.0, begins_s: float = 0.0, count: int = 400) -> Seen:
    """Four streams that each send a request a second, the first of which wait for a long time."""
    rng = np.random.default_rng(seed)
    start_s = begins_s + np.arange(count) // 4 + rng.uniform(0, 0.01, count)
    ttft_s = 0.1 * slower * rng.uniform(0.8, 1.2, count)
    ttft_s[:4] = 0.7
    tokens = rng.integers(32, 97, count)
    tpot_s = 0.002 * rng.uniform(0.9, 1.1, count)
    first_s = start_s + ttft_s
    return Seen(start_s, first_s, first_s + tpot_s * (tokens - 1), tokens.astype(np.float64))


def ratios(rows: list[dict[str, Any]]) -> dict[str, tuple[float, Any, Any]]:
    return {row["figure"]: (row["ratio"], row["low"], row["high"]) for row in rows}


def test_equals_are_equal_and_a_tenth_is_seen() -> None:
    """Intervals of 95 %, for fixed seeds: these two of them hold what they should."""
    same = ratios(rows_of(4, client(1), client(2, begins_s=20.3)))
    for figure in ("ttft_ms_p50", "tpot_ms_p50"):
        ratio, low, high = same[figure]
        assert low < 1.0 < high and ratio == pytest.approx(1.0, abs=0.03)
    assert same["output_tokens_per_s"][0] == pytest.approx(1.0, abs=0.05)
    slower = ratios(rows_of(4, client(1), client(2, slower=1.1)))
    assert slower["ttft_ms_p50"][2] < 1.0, "theirs take longer"
    low, high = slower["tpot_ms_p50"][1:]
    assert low < 1.0 < high


def test_only_the_time_that_both_were_at_work_counts() -> None:
    early, late = client(1, count=80), client(2, begins_s=10.0)
    rows = rows_of(4, early, late)
    # Sent after the end of the late one's first round, at 10.8 s, and before 19 s, when the early
    # one sent its last.
    assert rows[0]["requests"] == pytest.approx(2 * 4 * 9, abs=4)
    assert max(row["ours"] for row in rows if row["figure"] == "ttft_ms_p50") < 200
    with pytest.raises(RuntimeError, match="hardly ran at once"):
        rows_of(4, client(1, count=40), client(2, begins_s=9.0))


@pytest.mark.parametrize("failed", [0, 3])
def test_ours_runs_while_theirs_does(tmp_path: Path, failed: int) -> None:
    program = tmp_path / "vllm"
    program.write_text(f"#!{sys.executable}\n" + VLLM.replace("FAILED", str(failed)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    prompts, result = tmp_path / "prompts.jsonl", tmp_path / "result.json"
    sizes = {"num_blocks": 512, "max_model_tokens": 600, "block_size_tokens": 8}
    with serving(make_engine(max_slots=8, **sizes)) as served:
        url = f"http://127.0.0.1:{served.port}"
        model = asyncio.run(write_prompts(url, prompts, 30, prompt_tokens=20, seed=1))
        items = draw_lengths(prompts, 8)
        lengths = [item.fields["max_tokens"] for item in items]
        assert set(lengths) <= set(range(4, 13)) and len(set(lengths)) > 4
        run = Run(url, model, tmp_path, prompts, 2, 30, -1, result)
        if failed:
            with pytest.raises(RuntimeError, match="3 calls of vllm failed"):
                asyncio.run(at_once(str(program), run, items, 0.5))
            return
        ours, theirs = asyncio.run(at_once(str(program), run, items, 0.5))
    assert theirs.tpot_ms == pytest.approx(np.full(100, 10.0))
    assert ours.start_s[0] > theirs.start_s[0] - 0.1 and ours.end_s[-1] < theirs.start_s[0] + 5
    sent = islice(cycle(lengths), len(ours.tokens))  # two at a time: one may overtake the other
    assert Counter(ours.tokens.tolist()) == Counter(map(float, sent))
