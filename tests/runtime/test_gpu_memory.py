"""An executor allocates as many bytes as were counted before KV got the rest; KV in fp8."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from cbatch.core.request.errors import FieldError
from cbatch.runtime.backend import LargestStep
from cbatch.runtime.gpu import loaded, memory
from cbatch.runtime.gpu.decoder import Decoder
from cbatch.runtime.gpu.executor import GpuExecutor
from cbatch.runtime.gpu.experts import ExpertsForward, bytes_per_token
from cbatch.runtime.gpu.memory import StepLimits, step_memory_bytes
from cbatch.runtime.gpu.target_pass import SamplingFeatures
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.records import Experts
from tests.gpu_proofs.meta import head_of
from tests.runtime.engines import NoisyWeights, tiny_config

CPU = torch.device("cpu")
LIMITS = StepLimits(
    max_num_seqs=7,
    max_sequence_tokens=2048,
    max_num_batched_tokens=24,
    block_size=16,
    max_drafts=3,
)
NUM_BLOCKS = 8


class LiveBytes(TorchDispatchMode):
    """Bytes of storages that operations have made since entry, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._tensors: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and func._schema.name != "aten::set_":
            storage = result.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
            known = address in self._tensors or not size
            if not known and not any(_shares(each, address) for each in (args, kwargs)):
                self.now += size
                self.most = max(self.most, self.now)
                self._tensors[address] = 0
            if address in self._tensors:
                self._tensors[address] += 1
                weakref.finalize(result, self._gone, address, size)
        return result

    def _gone(self, address: int, size: int) -> None:
        self._tensors[address] -= 1
        if not self._tensors[address]:
            del self._tensors[address]
            self.now -= size


def _shares(arguments: Any, address: int) -> bool:
    if isinstance(arguments, Tensor):
        return arguments.untyped_storage().data_ptr() == address
    values = arguments.values() if isinstance(arguments, dict) else arguments
    return isinstance(values, (tuple, list)) and any(_shares(x, address) for x in values)


class Weights(NoisyWeights):
    """Weights of a model, and of a head of usual sizes that drafts the first ids."""

    file, names = "made up", frozenset(["lm_head.weight"])

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    def shape_of(self, name: str) -> None:
        return None


EXPERTS = {
    "model_type": "qwen2_moe",
    "num_experts": 16,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 192,
}


def decoder(**fields: Any) -> Decoder:
    config = tiny_config(vocab_size=4000, head_dim=16, **fields)
    return Decoder(config, Weights(1), torch.float32, CPU)


@pytest.mark.parametrize("drafts", ["model", "eagle3", "medusa", None])
def test_steps_take_what_was_counted(drafts: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's products have no workspaces, no request wants log probabilities, and kernels, which
    allocate nothing, do not run."""
    monkeypatch.setattr(memory, "LIBRARY_BYTES", 0)
    monkeypatch.setattr(memory, "LOGPROB_COPIES", 0)
    monkeypatch.setattr(JITFunction, "__getitem__", lambda *_: lambda *_, **__: None)
    target, draft = decoder(), None
    if drafts is not None:
        weights = Weights(1)
        draft = decoder() if drafts == "model" else head_of(drafts, target, target.config, weights)
    is_head = drafts in ("eagle3", "medusa")
    limits = LIMITS._replace(max_drafts=3 if drafts else 0, is_head=is_head)
    sizes = limits._asdict()
    del sizes["is_head"]
    with torch.inference_mode(), np.errstate(all="ignore"), LiveBytes() as live:
        executor = GpuExecutor(target, num_blocks=NUM_BLOCKS, draft=draft, **sizes)
        kept = live.now - sum(kv.data.nbytes for kv in (executor.kv, executor.draft_kv) if kv)
        before, live.most = live.now, live.now
        logits = executor.target_pass.max_logits
        rows = limits.max_num_seqs if drafts else 0
        features = SamplingFeatures(shaped=True, rejection_sampled=draft is not None)
        tokens = limits.max_num_batched_tokens
        executor.target_pass.compute(executor.queue, tokens, tokens)
        executor.target_pass.find_logits(executor.queue, logits)
        executor.target_pass.decide(executor.queue, logits, features)
        if executor.draft_passes is not None:
            tokens = limits.max_catch_up
            executor.draft_passes.run(executor.queue, tokens, tokens, rows, 2, True)
        peak = live.most - before
    counted = step_memory_bytes(target, draft, limits)
    if is_head:
        kept -= NUM_BLOCKS * draft.state_bytes  # it is counted in addition to KV
    assert kept + peak <= counted < 1.6 * (kept + peak), (kept, peak, counted)


def test_experts_take_what_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few tokens have a tile for each pair, many share the tiles of all experts."""
    monkeypatch.setattr(JITFunction, "__getitem__", lambda *_: lambda *_, **__: None)
    made = decoder(**EXPERTS)
    f, hidden = made.config.feed_forward, made.config.hidden_size
    experts = made.layers[0].products()[2]
    assert isinstance(f, Experts) and isinstance(experts, ExpertsForward)
    for tokens in (1, 500):
        rows = torch.zeros(tokens, hidden)
        with torch.inference_mode(), LiveBytes() as live:
            experts(rows)
        assert live.most <= tokens * bytes_per_token(f, hidden, 4) < 1.3 * live.most


def test_kv_takes_of_what_steps_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an 8 GiB device the default leaves room for a whole step; a step that does not fit is
    refused by name."""
    target, free = decoder(), 8 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
    monkeypatch.setattr(loaded, "step_memory_bytes", lambda *_: 5 << 30)
    models, step = loaded.GpuModels(target, None, "auto"), LargestStep(32, 64, 1024, 64, 0)
    assert models.kv_memory_bytes(step, None, 1 << 30) == int(0.85 * (3 << 30))
    # Of 16 GiB, 8 are in use and a step takes 5.
    assert models.kv_memory_bytes(step, 0.9, 1 << 30) == int(0.9 * (16 << 30)) - (13 << 30)
    assert models.kv_memory_bytes(step, 0.75, 1 << 30) == -(1 << 30)
    monkeypatch.setattr(loaded, "step_memory_bytes", lambda *_: 9 << 30)
    with pytest.raises(
        FieldError, match="max_num_seqs: steps need 9,216 MiB, and the weights leave 8,192 MiB"
    ):
        models.kv_memory_bytes(step, None, 1 << 30)


def test_blocks_in_fp8_are_zeroed() -> None:
    kv = KVCache(tiny_config(), 3, 16, torch.float8_e4m3fn, "cpu")
    kv.data.view(torch.uint8).fill_(7)
    kv.zero_blocks([1])
    zero = [bool((kv.data[:, :, :, i].float() == 0).all()) for i in range(3)]
    assert zero == [False, True, False]


def test_scales_come_from_the_checkpoint() -> None:
    class Scaled(NoisyWeights):
        def scalar(self, name: str) -> float | None:
            return {"model.layers.1.self_attn.k_scale": 0.125}.get(name)

    made = Decoder(tiny_config(), Scaled(1), torch.float32, CPU)
    assert made.kv_scales[:2] == [(1.0, 1.0), (0.125, 1.0)]
