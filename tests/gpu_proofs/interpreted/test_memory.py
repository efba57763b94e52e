"""An executor allocates as many bytes as were counted before KV got the rest; KV in fp8."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cbatch.core.request.errors import FieldError
from cbatch.runtime.backend import LargestStep
from cbatch.runtime.gpu import loaded, memory
from cbatch.runtime.gpu.decoder import Decoder
from cbatch.runtime.gpu.executor import GpuExecutor
from cbatch.runtime.gpu.heads import CLASSES
from cbatch.runtime.gpu.memory import StepLimits, step_memory_bytes
from cbatch.runtime.gpu.target_pass import SamplingFeatures
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.head_config import HeadConfig, head_layer
from tests.gpu_proofs.interpreted.twins import CPU, Pair
from tests.gpu_proofs.sizes import HeadTensors
from tests.runtime.engines import NoisyWeights, tiny_config
from tests.triton_kernels.interpreter.quick import without_overflow_checks

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
LIMITS = StepLimits(
    max_num_seqs=7,
    max_sequence_tokens=2048,
    max_num_batched_tokens=24,
    block_size=16,
    max_drafts=3,
)
NUM_BLOCKS = 8


class LiveBytes(TorchDispatchMode):
    """Bytes of storages that operations have made since entry, now and at most. The interpreter's
    copies of arguments do not count."""

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
                known = True
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


@pytest.fixture(autouse=True)
def steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare steps: a CPU's products have no workspaces, and no request wants log probabilities.
    Steps compute on uninitialised memory, whose sums may overflow."""
    without_overflow_checks(monkeypatch)
    monkeypatch.setattr(memory, "LIBRARY_BYTES", 0)
    monkeypatch.setattr(memory, "LOGPROB_COPIES", 0)


def head_of(kind: Any, target: Pair) -> Any:
    """Return a head of usual sizes with arbitrary values."""
    reads = target.config.num_layers
    layer = structs.replace(target.config, layers=target.config.layers[: kind != "medusa"])
    if kind != "medusa":
        layer = head_layer(layer, kind)
    layers = tuple(range(reads + 1)) if kind == "eagle3" else (reads,)
    config = HeadConfig(kind, layer, layers, layer.vocab_size, fc_norm=True, num_heads=3)
    rows = torch.zeros(layer.vocab_size, layer.hidden_size)
    return CLASSES[kind](config, HeadTensors(torch.float32, CPU), target.decoder, rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("drafts", ["model", "eagle3", "medusa", None])
def test_steps_take_what_was_counted(drafts: str | None) -> None:
    target, draft = Pair(vocab_size=4000), None
    if drafts is not None:
        other = Pair(noise=0.1, vocab_size=4000)
        draft = other.decoder if drafts == "model" else head_of(drafts, target)
    limits = LIMITS if drafts else LIMITS._replace(max_drafts=0)
    limits = limits._replace(is_head=drafts not in ("model", None))
    with torch.inference_mode(), np.errstate(all="ignore"), LiveBytes() as live:
        executor = GpuExecutor(
            target.decoder,
            num_blocks=NUM_BLOCKS,
            draft=draft,
            **{name: value for name, value in limits._asdict().items() if name != "is_head"},
        )
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
    counted = step_memory_bytes(target.decoder, draft, limits)
    if limits.is_head:
        kept -= NUM_BLOCKS * draft.state_bytes  # it is counted in addition to KV
    assert kept + peak <= counted < 1.6 * (kept + peak), (kept, peak, counted)


def test_kv_takes_of_what_steps_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an 8 GiB device the default leaves room for a whole step; a step that does not fit is
    refused by name."""
    decoder = Pair(vocab_size=4000).decoder
    free = 8 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
    monkeypatch.setattr(loaded, "step_memory_bytes", lambda *_: 5 << 30)
    decoder.device = torch.device("cuda")
    models, step = loaded.GpuModels(decoder, None, "auto"), LargestStep(32, 64, 1024, 64, 0)
    assert models.kv_memory_bytes(step, None, 1 << 30) == int(0.85 * (3 << 30))
    # Of 16 GiB, 8 are in use and a step takes 5.
    assert models.kv_memory_bytes(step, 0.9, 1 << 30) == int(0.9 * (16 << 30)) - (13 << 30)
    assert models.kv_memory_bytes(step, 0.75, 1 << 30) == -(1 << 30)
    monkeypatch.setattr(loaded, "step_memory_bytes", lambda *_: 9 << 30)
    with pytest.raises(
        FieldError, match="max_num_seqs: steps need 9,216 MiB, and the weights leave 8,192 MiB"
    ):
        models.kv_memory_bytes(step, None, 1 << 30)
    decoder.device = CPU


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

    decoder = Decoder(tiny_config(), Scaled(1), torch.float32, torch.device("cpu"))
    assert decoder.kv_scales[:2] == [(1.0, 1.0), (0.125, 1.0)]
