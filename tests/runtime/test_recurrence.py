"""States by block: the logits of a token have the same bits in every schedule of chunks, drafts,
boundaries and restarts from a page."""

from __future__ import annotations

import functools
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.cpu.compiled_pass import CompiledDecoder
from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.records import Norm, Recurrence
from cbatch.runtime.state_memory import slot_bytes
from tests.runtime.engines import NoisyWeights, tiny_config
from tests.runtime.marks import needs_compiler

BLOCK, LENGTH, MAX_DRAFTS = 4, 45, 8
TOKENS = np.random.default_rng(0).integers(0, 64, LENGTH)
NORM = Norm("input_layernorm", 1e-5)
HEADS = {"heads": 4, "value_dim": 20, "key_heads": 2, "key_dim": 18, "norm_eps": 1e-5}
MIXERS = {
    "convolution": Recurrence(
        norm=NORM, rule="convolution", heads=1, value_dim=32, kernel=3, conv_bias=True
    ),
    "delta": Recurrence(norm=NORM, rule="delta", kernel=4, **HEADS),
    "scan": Recurrence(norm=NORM, rule="scan", kernel=4, **HEADS, groups=2, conv_bias=True),
}
RULES = pytest.mark.parametrize("rule", MIXERS)
Fault = Literal["entry", "page", "no page", None]


@functools.cache
def model_of(rule: str) -> Model:
    """Return a model with two recurrent layers around attention; its threads share every step."""
    config = tiny_config(num_hidden_layers=3)
    layers = [replace(each, mixer=MIXERS[rule]) for each in config.layers]
    layers[1] = config.layers[1]
    model = Model(replace(config, layers=tuple(layers)), NoisyWeights(2), torch.float32, "auto")
    if isinstance(model._pass, CompiledDecoder):
        model._pass._single_thread_rows = 0
    return model


class Run:
    """A sequence in slot `slot`, next to another one that takes three tokens in each step. Memory
    begins as NaN: what is read must have been written."""

    def __init__(self, model: Model, fault: Fault = None) -> None:
        pages = 2 * (LENGTH + MAX_DRAFTS) // BLOCK + 2
        sizes = 2 * pages, BLOCK, torch.float32, "cpu"
        limits = {"num_pages": pages, "num_slots": 3, "max_drafts": MAX_DRAFTS}
        self.model, self.kv, self.fault = model, KVCache(model.config, *sizes, **limits), fault
        assert self.kv.state is not None
        self.memory = [layer for layer in self.kv.state.layers if layer is not None]
        for layer in self.memory:
            for part in layer:
                part.fill_(torch.nan)
        self.pages, self.slot, self.done, self.other = pages // 2, 0, 0, 0
        self.logits = torch.empty(LENGTH, 64)

    def step(self, count: int, drafts: int, seed: int) -> None:
        """Run `count` tokens and wrong drafts after them. Boundaries that are only passed have a
        page of their own or none."""
        rng = np.random.default_rng(seed)
        count = min(count, LENGTH - self.done)
        wrong = rng.integers(0, 64, min(drafts, MAX_DRAFTS))
        own = np.concatenate([TOKENS[self.done : self.done + count], wrong])
        other = TOKENS[::-1][self.other : self.other + 3]
        starts, rows = [self.done, self.other], [own, other] if len(other) else [own]
        lens = np.array([len(each) for each in rows], np.int32)
        contexts = np.array(starts[: len(rows)], np.int32) + lens
        first, kept, last = self.done // BLOCK, (self.done + count) // BLOCK, contexts[0] // BLOCK
        tables = np.arange(self.pages) + np.array([[0], [self.pages]])[: len(rows)]
        passed = [j for j in range(first + 1, last) if j != kept and rng.random() < 0.5]
        states = tables - 1
        states[0, passed] = -1
        if self.fault == "page" and first > 1:
            states[0, first] -= 1
        if self.fault == "no page":
            states[0, last] = -1
        before = [part[self.slot].clone() for part in self.memory[0][2:]]
        batch = RaggedBatch(
            tokens=torch.from_numpy(np.concatenate(rows)),
            positions=torch.empty(0),
            query_lens=lens,
            context_lens=contexts,
            block_tables=tables.astype(np.int32),
            logits_index=torch.arange(count),
            state_tables=states.astype(np.int32),
            state_slots=np.array([self.slot, 2][: len(rows)], np.int32),
        )
        self.logits[self.done : self.done + count] = self.model.forward(batch, self.kv)
        if self.fault == "entry":
            for part, old in zip(self.memory[0][2:], before, strict=True):
                part[self.slot] = old
        self.done, self.other = self.done + count, self.other + len(other)

    def restart(self) -> None:
        """Go on in another slot from the page of the last boundary."""
        self.slot, self.done = 1 - self.slot, self.done // BLOCK * BLOCK


@functools.cache
def expected(rule: str) -> torch.Tensor:
    run = Run(model_of(rule))
    run.step(LENGTH, 0, 0)
    return run.logits


STEPS = st.lists(
    st.tuples(
        st.one_of(st.integers(1, 3), st.integers(1, LENGTH)),
        st.sampled_from([0, 0, 1, 3, 5, MAX_DRAFTS]),
        st.integers(0, 99),
        st.booleans(),
    ),
    min_size=1,
    max_size=20,
)


@needs_compiler
@RULES
@settings(deadline=None, max_examples=40)
@given(steps=STEPS)
def test_bits_do_not_depend_on_the_schedule(
    rule: str, steps: list[tuple[int, int, int, bool]]
) -> None:
    run = Run(model_of(rule))
    for count, drafts, seed, restarts in steps:
        if restarts:
            run.restart()
        if run.done < LENGTH:
            run.step(count, min(drafts, LENGTH), seed)
    computed, known = run.logits[: run.done], expected(rule)[: run.done]
    assert torch.equal(computed.view(torch.int32), known.view(torch.int32))


@needs_compiler
@RULES
@pytest.mark.parametrize("fault", ["entry", "page"])
def test_a_planted_fault_changes_bits(rule: str, fault: Fault) -> None:
    """An entry that is not overwritten after a rejected draft; a page one boundary early."""
    runs = [Run(model_of(rule), each) for each in (None, fault)]
    for run in runs:
        for i in range(12):
            run.step(2, 3, i)
    good, bad = (run.logits[: runs[0].done] for run in runs)
    assert torch.equal(good, expected(rule)[: len(good)])
    assert not torch.equal(bad, good)


@RULES
def test_bytes_of_a_page_and_of_a_slot(rule: str) -> None:
    config = model_of(rule).config
    state = KVCache(config, 1, BLOCK, torch.float32, "cpu", 3, 2, MAX_DRAFTS).state
    assert state is not None
    layers = [layer for layer in state.layers if layer is not None]
    assert 3 * config.state_page_bytes == sum(p.nbytes for each in layers for p in each[:2])
    entries = sum(p.nbytes for each in layers for p in each[2:])
    assert 2 * slot_bytes(config, BLOCK, MAX_DRAFTS) == entries


@RULES
def test_a_step_without_a_page_is_refused(rule: str) -> None:
    with pytest.raises(IndexError, match="state_tables: without the page of a boundary"):
        Run(model_of(rule), "no page").step(LENGTH, 0, 0)


@needs_compiler
@pytest.mark.parametrize("rule", ["delta", "scan"])
def test_floats_below_the_normal_range_are_0_in_a_pass_alone(rule: str) -> None:
    """They are seen where a state only decays: in the columns that pad values."""
    run, small = Run(model_of(rule)), 1e-39
    run.step(BLOCK, 0, 0)
    run.memory[0].states[0] = small  # of the first boundary
    run.step(BLOCK, 0, 0)
    after = run.memory[0].states[1].abs()
    tiny = after[after < torch.finfo(torch.float32).tiny]
    assert len(tiny) and (tiny == 0).all()
    assert np.float32(small) * np.float32(1) != 0
