"""The GPU executor's host side: messages to the device, shapes of batches, what is refused."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import Request, StructuredOutputs
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.executor import RowError
from cbatch.core.scheduler.plan import Deltas, NewSequence, RowStatus, StepPlan
from cbatch.engine.build import scheduler_config
from cbatch.engine.model_files import backend_of
from cbatch.engine.options import EngineOptions
from cbatch.runtime.backend import Requirements
from cbatch.runtime.cpu.loaded import CpuModels
from cbatch.runtime.drafting.lookups import NgramLookup
from cbatch.runtime.gpu.attention import Tuning
from cbatch.runtime.gpu.decoder import Decoder
from cbatch.runtime.gpu.device import bucket, ladder
from cbatch.runtime.gpu.executor import GpuExecutor
from cbatch.runtime.gpu.host_drafts import KnownTokens, LookupSettings
from cbatch.runtime.gpu.loaded import GpuModels
from cbatch.runtime.gpu.memory import check_pool, kv_dtype_of
from cbatch.runtime.gpu.slots import neutral, shapes_logits, sparse_of
from cbatch.runtime.model.config import ModelConfig
from tests.helpers import make_request
from tests.runtime import engines
from tests.runtime.engines import NoisyWeights, tiny_config, tiny_model
from triton_kernels.attention import Heads
from triton_kernels.slots import advance as fields

I32 = np.int32
NONE = np.zeros(0, dtype=I32)


def test_buckets_hold_what_they_are_for() -> None:
    for limit in (1, 5, 32, 600, 2048):
        for count in range(1, limit + 1):
            assert count <= bucket(count, limit) <= limit
        assert bucket(0, limit) == 0
        assert {bucket(n, limit) for n in range(1, min(limit, 512) + 1)} == set(ladder(limit))


def admission(**params: Any) -> NewSequence:
    """Return an admission with three tokens of a prompt and two of an output."""
    settings = {"max_total": 12, "blocks": (0,), "num_prompt_tokens": 3, "stop_ids": (5, 99)}
    return engines.admission(0, [1, 2, 2, 6, 6], **settings, **params)


def test_lists_hold_what_a_request_asks_for() -> None:
    a = admission(
        min_tokens=4,
        logit_bias={7: 2.0, 8: -1.0},
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        banned_token_ids=(8, 9),
    )
    assert shapes_logits(a.params, has_stops=True)
    sparse = sparse_of(a, vocab_size=70)
    assert sparse.listed.tolist() == [1, 2, 5, 6, 7]  # id 8 is banned, 99 is no id of the model
    assert sparse.bias.tolist() == [0, 0, 0, 0, 2.0]
    assert sparse.counts.tolist() == [0, 0, 0, 2, 0]
    assert sparse.marks.tolist() == [1, 1, 2, 0, 0]
    assert sparse.min_tokens == 2  # two of four are generated
    plain = [i for i in range(70) if (int(sparse.plain[i // 32]) >> (i % 32)) & 1]
    assert plain == [i for i in range(70) if i not in (1, 2, 5, 6, 7, 8, 9)]
    assert not shapes_logits(admission().params, has_stops=True)
    assert not shapes_logits(admission(min_tokens=1).params, has_stops=False)
    assert (neutral(70).plain == -1).all()


def ones(*ids: int) -> dict[int, float]:
    """Return a bias of 1 for the ids of a range."""
    return dict.fromkeys(range(*ids), 1.0)


def request(**params: Any) -> Request:
    return make_request("a", [1, 2, 2], **{"max_tokens": 9} | params)


@pytest.mark.parametrize(
    "params, field",
    [
        ({"logit_bias": ones(1300), "presence_penalty": 0.1}, "logit_bias"),
        ({"logit_bias": ones(1900)}, "logit_bias"),
        ({"stop_token_ids": tuple(range(1900)), "min_tokens": 2}, "stop_token_ids"),
        (
            {
                "stop_token_ids": tuple(range(1300)),
                "min_tokens": 2,
                "logit_bias": ones(1300, 1700),
            },
            "stop_token_ids",
        ),
        ({"drafter": ("model",)}, "drafter"),
        ({"structured_outputs": StructuredOutputs(regex="a")}, "structured_outputs"),
    ],
)
def test_a_request_that_a_slot_cannot_hold_is_refused_before_it_enters(
    params: dict[str, Any], field: str
) -> None:
    """Lists have room for the context, here 400 tokens, and 1,024 entries more."""
    lookups = LookupSettings({"ngram": NgramLookup()}, ("ngram",))
    vocab = tiny_config(vocab_size=2000)
    served = executor(vocab, max_sequence_tokens=400, lookups=lookups, max_drafts=2)
    served.check(request())
    served.check(request(logit_bias=ones(1024), min_tokens=1, max_tokens=390))
    with pytest.raises(FieldError, match=f"^{field}: .*; ") as caught:
        served.check(request(max_tokens=390, **params))
    assert caught.value.field == field


def test_tokens_that_are_banned_need_no_room() -> None:
    served = executor(tiny_config(vocab_size=2000))
    bias = ones(1900)
    served.check(request(logit_bias=bias, banned_token_ids=tuple(range(1000))))
    served.check(request(logit_bias=bias, allowed_token_ids=(1, 5)))
    whole = executor()  # every token fits the lists of a small vocabulary
    whole.check(request(logit_bias=ones(64), frequency_penalty=1.0))


def decoder(config: ModelConfig | None = None) -> Decoder:
    weights = NoisyWeights(1)
    return Decoder(config or tiny_config(), weights, torch.float32, torch.device("cpu"))


def executor(config: ModelConfig | None = None, **settings: Any) -> GpuExecutor:
    sizes = {"num_blocks": 8, "block_size": 16, "max_num_seqs": 2}
    budget = {"max_sequence_tokens": 40, "max_num_batched_tokens": 16}
    return GpuExecutor(decoder(config), **sizes | budget | settings)


def plan(*admitted: NewSequence, generation: int = 1, query_len: int = 5) -> StepPlan:
    one = np.ones(1, dtype=I32)
    return StepPlan(
        step_id=4,
        slots=one * 0,
        generations=one * generation,
        query_lens=one * query_len,
        num_drafts=one * 0,
        catch_up=one * 0,
        wants_logits=one.astype(np.bool_),
        deltas=Deltas(False, NONE, NONE, admitted, NONE, NONE, NONE),
    )


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="do not hold the planned generations"):
        executor().submit(plan(admission(), generation=2))
    with pytest.raises(ValueError, match="query_lens: 17 is more than the 16"):
        executor().submit(plan(admission(), query_len=17))
    with pytest.raises(RowError, match="admission of 'r0'"):
        executor(max_sequence_tokens=16).submit(
            plan(structs.replace(admission(), max_total_tokens=17))
        )
    lookups = LookupSettings({"ngram": NgramLookup()}, ("ngram",))
    with pytest.raises(RowError, match="drafter: 'model' is not loaded; use: ngram"):
        executor(lookups=lookups, max_drafts=2).submit(plan(admission(drafter=("model",))))
    with pytest.raises(RowError, match="structured_outputs: is not supported here"):
        structured = admission(structured_outputs=StructuredOutputs(regex="a"))
        executor(lookups=lookups, max_drafts=2).submit(plan(structured))
    with pytest.raises(RuntimeError, match="no step was submitted"):
        executor().wait()


def test_a_dead_end_ends_its_own_sequence_only() -> None:
    """The slot of a pending step's sequence may have another one by now."""
    known = KnownTokens(2, 16, 128, None)
    known.admit(admission())
    for generation, status in ((0, 0), (1, RowStatus.NO_TOKEN)):
        rows = np.zeros((2, fields.NUM_FIELDS), dtype=I32)
        rows[:, fields.EMITTED] = 1
        known.end_dead_ends(plan(generation=generation), {0: 0}, rows)
        assert known.failed[0] == rows[0, fields.STATUS] == status


def test_block_sizes_that_a_gpu_does_not_serve() -> None:
    backend_of("cuda:1").check_supported(Requirements("a model", block_size=16))
    for size in (48, 8):
        needs = Requirements("a model", block_size=size)
        backend_of("cpu").check_supported(needs)
        with pytest.raises(FieldError, match="^block_size: .* or --device cpu"):
            backend_of("cuda:1").check_supported(needs)


@pytest.mark.parametrize("block_size, head_dim", [(16, 8), (64, 8), (16, 16)])
def test_a_pool_beyond_the_offsets_of_attention_is_refused(block_size: int, head_dim: int) -> None:
    """One block more than the largest pool; the draft's blocks are as many."""
    limit = (2**31 - 1) // (2 * block_size * head_dim) - 1
    config = SchedulerConfig(num_blocks=limit + 1, block_size=block_size, vocab_size=64)
    wide = tiny_config(head_dim=head_dim)
    check_pool(wide, limit, block_size)
    target, draft = decoder(wide), decoder(tiny_config(head_dim=4))
    for models in (GpuModels(target, None, "auto"), GpuModels(draft, target, "auto")):
        with pytest.raises(FieldError, match=f"^num_blocks: .*; give at most {limit}$"):
            models.executor(config, max_drafts=2)


def test_heads_without_a_tile_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with pytest.raises(FieldError, match="^model: Heads.* are not supported .*; use --device cpu"):
        Tuning.of(Heads(1, 17, 128), torch.bfloat16, torch.device("cuda"), 16)


@pytest.mark.parametrize("query_tokens, rows", [(1, 16), (5, 32), (9, 32)])
def test_queries_have_tiles_of_their_kind(
    query_tokens: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes and verifications have one kind of tile, prompts another. With batch-invariant bits
    all have the same."""
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    heads, device = Heads(8, 4, 128), torch.device("cuda")
    of = partial(Tuning.of, heads, torch.bfloat16, device, 64, query_tokens=query_tokens)
    fast, invariant = of(numerics="fast"), of(numerics="invariant")
    assert fast.prefill is not None and fast.balanced and fast.prefill.balanced
    assert (fast.tile.rows, fast.prefill.tile.rows, fast.prefill.prefill) == (rows, 128, None)
    lists = fast.work_lists(heads, torch.device("cpu"), max_tokens=600, max_sequences=9)
    short, long = (work for work, _ in lists[None])
    assert short.queries == (1, max(rows // 4, query_tokens))
    assert long.queries == (short.queries[1] + 1, 600)
    assert (invariant.tile.rows, invariant.prefill, invariant.balanced) == (64, None, False)


def test_fp8_is_refused_where_there_is_none() -> None:
    needs = Requirements("a model", block_size=16, kv_cache_dtype="fp8")
    with pytest.raises(FieldError, match="^kv_cache_dtype: 'fp8' .* on a CPU; .* --device cuda"):
        backend_of("cpu").check_supported(needs)
    backend_of("cuda").check_supported(needs)
    with pytest.raises(FieldError, match="^kv_cache_dtype: fp8 is not supported .* on sm_80"):
        kv_dtype_of(decoder(), "fp8")
    with pytest.raises(FieldError, match="^kv_cache_dtype: 'int4' is not allowed; use 'auto'"):
        EngineOptions(kv_cache_dtype="int4")  # type: ignore[arg-type]


def test_defaults_of_a_device() -> None:
    """A GPU gets the next plan while it runs one. Its blocks are those that attention prefers."""
    for device, overlap, tokens in (("cpu", 0, 16), ("cuda", 1, 64), ("cuda:1", 1, 64)):
        backend = backend_of(device)
        assert (backend.default_overlap, backend.default_block_size) == (overlap, tokens)
    models = CpuModels(tiny_model(), None)
    for block_size, tokens in ((None, 64), (32, 32)):
        options = EngineOptions(block_size=block_size, num_blocks=8)
        assert scheduler_config(models, options, 64, kv_events=False).block_size == tokens


@pytest.mark.parametrize(
    ("numerics", "keeps", "answer", "words"),
    [
        ("fast", True, False, "batch_invariant: no (numerics=fast"),
        ("invariant", True, True, "batch_invariant: yes (numerics=invariant"),
        ("invariant", False, False, "are not batch-invariant"),
    ],
)
def test_a_gpu_says_whether_rows_are_invariant(
    numerics: str, keeps: bool, answer: bool, words: str
) -> None:
    model: Any = SimpleNamespace(numerics=numerics, keeps_bits=lambda: keeps)
    invariant, line = GpuModels(model, None, "auto").batch_invariance()
    assert invariant == answer and words in line


def test_nothing_of_the_gpu_is_imported_elsewhere() -> None:
    code = (
        "import sys, cbatch, cbatch.engine.build, cbatch.runtime.cpu.executor; "
        "assert not [m for m in sys.modules if m.startswith(('cbatch.runtime.gpu', 'triton.'))]"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
