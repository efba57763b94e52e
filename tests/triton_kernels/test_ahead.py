"""Kernels compiled ahead by other processes are those that a launch looks up in the cache."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.triton_kernels.driver import META, TARGETS, Driver
from triton_kernels.build import ahead
from triton_kernels.build.ahead import Specialisation
from triton_kernels.layers.norm import norm_rows
from triton_kernels.slots.state import Arena, ArenaSizes
from triton_kernels.slots.target_batch import TargetLayout, make_target_batch


def launch() -> None:
    """Launch kernels with named tuples of tensors, None, and numbers of every kind."""
    x, weight = torch.zeros(5, 48, device=META), torch.zeros(48, device=META)
    norm_rows(x.bfloat16(), weight, 1e-5)
    norm_rows(x.bfloat16(), weight, 1e-5, x)
    state = Arena.allocate(ArenaSizes(3, 32, 16, 40, 16), META).state
    layout = TargetLayout.allocate(3, 8, 4, META)
    make_target_batch(state, state.kv_len, layout, block_size=16, max_token=39)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty Triton cache, and let launches see an H100."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", Driver(TARGETS["sm_90"]))
    return tmp_path


def test_launches_find_in_the_cache_what_was_compiled_ahead(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ahead.listed() as kernels:
        launch()
        launch()
    assert len(kernels) == 3
    ahead.compile_all(kernels, processes=2)
    compiled = sorted(cache.iterdir())
    assert len(compiled) > 3

    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started for kernels that are there")

    monkeypatch.setattr(ahead, "subprocess", SimpleNamespace(Popen=start))
    ahead.compile_all(kernels)
    run = JITFunction.run
    monkeypatch.setattr(
        JITFunction, "run", lambda self, *args, **more: run(self, *args, **more | {"warmup": True})
    )
    launch()
    assert sorted(cache.iterdir()) == compiled


def test_a_kernel_that_does_not_compile_is_left_to_its_launch(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ahead.listed() as kernels:
        launch()
    (name, specialisation), *_ = kernels.items()
    ahead.compile_all(
        {name: specialisation._replace(options=specialisation.options | {"num_warps": 3})},
        processes=1,
    )
    assert f"not every kernel could be compiled ahead of: {specialisation.name}\n" in caplog.text


def test_a_process_that_hangs_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = (
        "import sys, time; from triton_kernels.build import ahead; ahead._MAX_S = 1; "
        "ahead.Specialisation.compile = lambda each: time.sleep(60); ahead.main(sys.argv[1:])"
    )
    monkeypatch.setattr(ahead, "COMMAND", (sys.executable, "-c", hangs))
    work = [Specialisation("", "", {}, {}, {}, {}, TARGETS["sm_90"])]
    assert ahead.start(work, niceness=1).wait() == -signal.SIGALRM
