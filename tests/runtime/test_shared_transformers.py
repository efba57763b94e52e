"""Models of transformers' code that ranks share by its own plans compute the same as the whole
model. Rank 1 is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cbatch import LLM, FieldError, SamplingParams
from cbatch.runtime.kv_cache import KVCache

pytest.importorskip("transformers", minversion="5.0", reason="the extra `models`")

from cbatch.runtime.cpu.transformers_backend.loading import load_transformers_model
from cbatch.runtime.cpu.transformers_backend.sharing import check_shared
from cbatch.runtime.rank_group import RankGroup, join
from tests.runtime.hf_models import paged, run_all
from tests.runtime.test_transformers_backend import SIZES, sequences
from tests.runtime.tiny_architectures import EVERY, make_tiny, tiny_config

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
# Models with experts; with gates and ups in one matrix; with latent attention.
SEVERAL = ("qwen3_moe", "phi3", "deepseek_v2")
UNSHARED = (
    *("aria_text", "biogpt", "bitnet", "ctrl", "gpt2", "gpt_bigcode", "gpt_oss", "granite_swa"),
    *("granitemoe_swa", "hunyuan_v1_dense", "jetmoe", "lfm2", "llama4_text", "modernbert-decoder"),
    *("moshi", "opt", "persimmon", "stablelm"),
)
SCARCE: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "threads": 1,
    "model_impl": "transformers",
    "tokenizer": "none",
    "num_blocks": 20,
    "block_size": 4,
    "max_num_batched_tokens": 16,
}


def logits_of(folder: Path, ranks: RankGroup | None) -> tuple[torch.Tensor, int, bool]:
    """Return logits of chunks and decodes in shared steps, the bytes of the matrices, and whether
    rows keep their bits."""
    model = load_transformers_model(folder, ranks=ranks)
    kv = KVCache(model.config, 20, 4, torch.float32, "cpu")
    rows = sequences((23, 11, 17))
    together = run_all(model, kv, paged(kv, rows), SIZES, firsts=[9, 4, 1])
    alone = torch.cat([run_all(model, kv, paged(kv, [row]), [4]) for row in rows])
    return together, model.matrix_bytes, torch.equal(together, alone)


def shares_of(
    rank: int, folder: Path, kinds: Sequence[str]
) -> list[tuple[torch.Tensor, int, bool]]:
    torch.set_num_threads(1)
    ranks = join(rank, 2, folder / "group")
    return [logits_of(folder / kind, ranks) for kind in kinds]


def check(kinds: tuple[str, ...], folder: Path) -> None:
    folders = [folder / kind for kind in kinds]
    for model_folder in folders:
        make_tiny(model_folder.name, model_folder)
    (folder / "group").mkdir()
    program = [sys.executable, "-m", "tests.runtime.test_shared_transformers", str(folder)]
    rank_1 = subprocess.Popen([*program, *kinds])
    threads = torch.get_num_threads()
    first = shares_of(0, folder, kinds)
    assert rank_1.wait() == 0
    torch.set_num_threads(threads)
    for model_folder, share in zip(folders, first, strict=True):
        whole, num_bytes, kept = logits_of(model_folder, None)
        shares = [share, torch.load(model_folder / "rank-1.pt")]
        assert torch.equal(shares[0][0], shares[1][0])
        for logits, rank_bytes, keeps in shares:
            assert (logits - whole).abs().max() < 1e-4 * whole.std(), model_folder.name
            assert rank_bytes < 0.95 * num_bytes, model_folder.name
            assert keeps == kept, model_folder.name
        assert not torch.equal(shares[0][0], whole), "sums are cut"


def test_logits_are_those_of_one_rank(tmp_path: Path) -> None:
    check(SEVERAL, tmp_path)


@pytest.mark.models
def test_those_of_every_other_architecture_are(tmp_path: Path) -> None:
    check(tuple(k for k in EVERY if k not in (*SEVERAL, *UNSHARED)), tmp_path)


def test_a_draft_of_transformers_is_whole_in_each_rank(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path / "model")
    make_tiny("granite", tmp_path / "draft")
    prompts = [s.tolist() for s in sequences((18, 5, 9))]
    settings = SCARCE | {"model_impl": "auto", "max_num_seqs": 3, "num_blocks": 64}
    llm = LLM(tmp_path / "model", tmp_path / "draft", lookahead="fixed:3", **settings)
    assert llm.info.code.startswith("our own")
    texts = []
    for limit in (0, None):
        params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, max_lookahead=limit)
        texts.append([each.token_ids for each in llm.generate(prompts, params)])
        assert bool(llm.engine.scheduler.stats.drafted_tokens) == (limit is None)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", ["gpt2", "gpt_oss", "aria_text", "granite_swa"])
def test_what_no_plan_shares_out_is_refused(kind: str, tmp_path: Path) -> None:
    assert kind in UNSHARED
    tiny_config(kind).save_pretrained(tmp_path)
    known = (
        f"transformers has no plan for sharding {kind}|the plan of {kind} asks for .* not supported"
    )
    with pytest.raises(FieldError, match=f"tensor_parallel_size: ({known}).*; leave it out"):
        check_shared(tmp_path, 2)


@pytest.mark.models
@pytest.mark.parametrize("kind", UNSHARED)
def test_so_is_every_other(kind: str, tmp_path: Path) -> None:
    tiny_config(kind).save_pretrained(tmp_path)
    with pytest.raises(FieldError, match="tensor_parallel_size"):
        check_shared(tmp_path, 2)


def test_heads_that_cannot_be_shared_out_are_refused_before_anything_loads(tmp_path: Path) -> None:
    tiny_config("gemma2").save_pretrained(tmp_path)  # without weights
    problem = (
        "tensor_parallel_size: 4 does not divide the model's num_key_value_heads, 2; leave it out"
    )
    with pytest.raises(FieldError, match=problem):
        LLM(tmp_path, tokenizer="none", tensor_parallel_size=4, random_weights_seed=1)


if __name__ == "__main__":
    parent, *names = Path(sys.argv[1]), *sys.argv[2:]
    for name, share in zip(names, shares_of(1, parent, names), strict=True):
        torch.save(share, parent / name / "rank-1.pt")
    os._exit(0)  # ranks end like this, too
