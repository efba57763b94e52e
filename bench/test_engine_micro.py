"""Micro-benchmark (`pytest bench --benchmark-enable`) of a batch through the whole engine."""

from __future__ import annotations

import pytest

from bench.engine.__main__ import parse
from bench.engine.shapes import write_random_model
from bench.engine.systems import build_cbatch, make_prompts

OUTPUT_TOKENS = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_random_model("llama-1m", tmp_path_factory.mktemp("models"), "float32")


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("lookahead", ["off", "fixed:4", "ema"])
def test_generate(benchmark, model, batch, lookahead):
    """Use the model as its own draft: every draft is accepted, so the policy keeps drafting."""
    args = parse(["--batch", str(batch), "--output-tokens", str(OUTPUT_TOKENS)])
    system, _ = build_cbatch(model, model, lookahead, args)
    prompts = make_prompts(model, args.prompt_tokens, batch, real=False)
    run = benchmark(system.run, prompts, OUTPUT_TOKENS)
    assert run.tokens == batch * OUTPUT_TOKENS
    assert (run.speculation.drafting_share > 0) == (lookahead != "off")
