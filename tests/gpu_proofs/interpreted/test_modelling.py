"""A model of transformers' modelling code on a simulated GPU: captured and replayed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cbatch import LLM, SamplingParams
from tests.gpu_proofs.pretence.gpu import Cuda, pretending, use_references

pytest.importorskip("transformers", minversion="5.0", reason="the extra `models`")

from tests.runtime.tiny_architectures import make_tiny

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
PROMPTS = [list(range(5, 25)), [7, 9, 11], list(range(40, 49))]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    with pretending() as cuda:
        use_references(cuda, monkeypatch)
        yield cuda


def text(folder: Path, device: str) -> list[list[int]]:
    llm = LLM(
        folder,
        device=device,
        model_impl="transformers",
        tokenizer="none",
        max_num_seqs=2,
        drafter=("ngram",),
        lookahead="fixed:2",
        block_size=16,
        num_blocks=64,
    )
    assert llm.info.device.startswith(device) and llm.info.code.startswith("transformers ")
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    completions = llm.generate(PROMPTS, params)
    assert [each.error for each in completions] == [None] * len(completions)
    return [[*each.choices[0].token_ids] for each in completions]


@pytest.mark.parametrize("kind", ["gemma2", "qwen3"])
def test_text_is_that_of_the_cpu(kind: str, cuda: Cuda, tmp_path: Path) -> None:
    make_tiny(kind, tmp_path)
    assert text(tmp_path, "cuda") == text(tmp_path, "cpu")
