"""Text and log probabilities of greedy and seeded requests are bit-identical, however the engine
runs them.

Cases: any batch, drafts and chunks, after preemptions, and on cached prefixes. One or two threads,
and after a restart on an idle or busy machine. Each case asserts that its condition occurred.
"""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from cbatch.demo import demo_paths
from cbatch.runtime.compiled import version
from tests.engine.written import PARAMS, SMOLLM2, Pair, Written, demo, smollm2, write
from tests.gguf_files import BF16, Q8_0, convert, gguf_bytes
from tests.runtime.hf_models import build
from tests.smollm2 import needs_smollm2

MODELS = ("bf16", "q8_0", SMOLLM2)
MOST = 64  # requests
WITH_A_DRAFT, LOOKUPS = (("model",), ("suffix", "model")), (("ngram",), ("suffix", "ngram"))
PairOf = Callable[[str], Pair]
Plain = Callable[[str, int], list[Any]]

CASES: dict[str, dict[str, Any]] = {
    "8 at once": {"batch": 8, "threads": 2},
    "32 at once": {"batch": 32, "threads": 1},
    "64 at once": {"batch": 64, "threads": 2, "lookahead": "fixed:2"},
    **{
        f"k = {k}": {"lookahead": f"fixed:{k}", "batch": (2, 8, 32)[k % 3], "threads": 1 + k % 2}
        for k in (1, 2, 3, 5, 8)
    },
    "adaptive": {"lookahead": "adaptive:8", "batch": 8, "threads": 2},
    "chunks of 33": {"lookahead": "fixed:2", "batch": 5, "chunk": 33, "threads": 2},
    "preemptions": {"lookahead": "fixed:3", "batch": 8, "scarce": True, "threads": 2},
    "prefix hits": {
        "lookahead": "fixed:3",
        "batch": 8,
        "enable_prefix_caching": True,
        "threads": 2,
    },
    "everything": {
        "lookahead": "adaptive:6",
        "batch": 8,
        "chunk": 48,
        "scarce": True,
        "enable_prefix_caching": True,
        "depth": 1,
        "threads": 2,
    },
}
# Cases of `make test`; the others run in `make test-statistics`.
OFTEN = ("k = 3", "everything")
OFTEN_BY_MODEL = {
    "bf16": ("64 at once", "adaptive", "chunks of 33", "preemptions", "prefix hits", *OFTEN),
    "q8_0": OFTEN,
    SMOLLM2: ("k = 3",),
}


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> PairOf:
    files = gguf_files(tmp_path_factory.mktemp("gguf"))
    pairs = {
        "bf16": functools.partial(demo, *demo_paths()),
        "q8_0": functools.partial(demo, *files),
        SMOLLM2: smollm2,
    }
    return lambda model: pairs[model]()


@pytest.fixture(scope="module")
def plain(pair_of: PairOf) -> Plain:
    """Return the output of each request alone, with one thread, no drafts, whole prompts and no
    cache. With smollm2 as many run as a case has."""

    @functools.cache
    def written(model: str, count: int) -> list[Any]:
        torch.set_num_threads(1)
        return write(pair_of(model), count).bits

    return lambda model, count: written(model, count if model == SMOLLM2 else MOST)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def gguf_files(folder: Path) -> list[Path]:
    """Write the demo's pair as GGUF files, the target as blocks."""
    paths = [folder / "target.gguf", folder / "draft.gguf"]
    for model, path, kind in zip(demo_paths(), paths, (Q8_0, BF16), strict=True):
        path.write_bytes(gguf_bytes(*convert(model, kind)))
    return paths


def count_of(pair: Pair, *, batch: int, scarce: bool = False, **_: Any) -> int:
    """Return the number of requests. Without a draft (smollm2), a few use all parameters."""
    few = len(PARAMS) if pair.draft is None else 16
    return max(24 if scarce else few, batch)


def check(pair: Pair, plain: list[Any], *, threads: int, chain: int = 0, **settings: Any) -> None:
    if settings.get("lookahead", "off") != "off":
        settings["drafter"] = (LOOKUPS if pair.draft is None else WITH_A_DRAFT)[chain]
    count = count_of(pair, **settings)
    torch.set_num_threads(threads)
    written = write(pair, count, **settings)
    for first in range(0, len(written.bits), count):
        assert written.bits[first : first + count] == plain[:count]
    assert_happened(written, **settings)


def assert_happened(
    written: Written,
    *,
    batch: int,
    lookahead: str = "off",
    drafter: Sequence[str] = (),
    chunk: int = 8192,
    scarce: bool = False,
    enable_prefix_caching: bool = False,
    depth: int = 0,
) -> None:
    stats, speculation = written.engine.scheduler.stats, written.engine.stats.speculation
    assert written.steps.widest == batch or (written.steps.widest > 1 and (scarce or chunk < 512))
    assert written.steps.mixed > 0 or batch == 1 or chunk > 64
    assert (stats.preemptions > 0) == scarce and (
        stats.prefix_hit_tokens > 0
    ) == enable_prefix_caching
    depths = speculation.k_histogram.keys()
    if drafter:
        assert speculation.accepted_tokens > 0 and speculation.rejections > 0
        policy, _, k = lookahead.partition(":")
        assert min(depths) == 0 and min(int(k), 2) <= max(depths) <= int(k)
        assert policy != "fixed" or max(depths) == int(k)
    else:
        assert depths == {0}


def _cases() -> list[Any]:
    cases = []
    for model, (name, settings) in itertools.product(MODELS, CASES.items()):
        marks = [needs_smollm2] if model == SMOLLM2 else []
        if name not in OFTEN_BY_MODEL[model]:
            marks.append(pytest.mark.statistics)
        cases.append(pytest.param(model, settings, id=f"{model}, {name}", marks=marks))
    return cases


@pytest.mark.parametrize(("model", "settings"), _cases())
def test_same_text(pair_of: PairOf, plain: Plain, model: str, settings: dict[str, Any]) -> None:
    pair = pair_of(model)
    check(pair, plain(model, count_of(pair, **settings)), **settings)


# --- starts ---------------------------------------------------------------------------------------


def output_of_process(models: Sequence[str], threads: int) -> str:
    """Return the output of a new process (see `written`) with a number of threads."""
    command = [sys.executable, "-m", "tests.engine.written", *models]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert process.returncode == 0 and f"{threads} threads" in process.stderr, process.stderr
    return process.stdout


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


@pytest.mark.slow
def test_a_restart_changes_no_bit(tmp_path: Path) -> None:
    """The process prints digests of the logits of a tiny model and of the demo model, and of the
    output of the demo pair in fp32 and quantised. The second start is on a busy machine."""
    build(tmp_path, "llama")
    version()  # the kernels are compiled once
    models = [str(tmp_path), *map(str, gguf_files(tmp_path))]
    idle = output_of_process(models, threads=2)
    with busy_processes(1):
        assert output_of_process(models, threads=1) == idle
