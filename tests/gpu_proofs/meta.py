"""GPU executors of full width (two layers) on tensors that have shapes and addresses but no values.
Torch raises if the host reads a value, or computes with tensors of the host and of the device."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor

from cbatch.core.request.request import Request, StructuredOutputs
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.grammars import Grammars
from cbatch.runtime.drafting.lookups import NgramLookup
from cbatch.runtime.gpu import attention, device_steps, memory
from cbatch.runtime.gpu.attention import Tuning
from cbatch.runtime.gpu.capture import GROUPS
from cbatch.runtime.gpu.decoder import Decoder
from cbatch.runtime.gpu.device import Device
from cbatch.runtime.gpu.executor import GpuExecutor
from cbatch.runtime.gpu.heads import CLASSES, GpuHead
from cbatch.runtime.gpu.host_drafts import LookupSettings
from cbatch.runtime.gpu.memory import kv_dtype_of
from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.config_json import parse_config
from cbatch.runtime.model.gguf_file import GgufTensor
from cbatch.runtime.model.head_config import HeadConfig, head_layer
from cbatch.runtime.model.weight_files import WeightSource
from cbatch.text import TextTokenizer
from tests.runtime.blocks import stored, stored_matrix
from tests.runtime.engines import make_request, run_engine
from tests.text.toy_tokenizers import printable
from tests.triton_kernels.driver import META, Launches

_MODEL_TOKENS = 2047
_PROCESSORS = SimpleNamespace(multi_processor_count=132)


class MetaDevice(Device):
    """A device that runs a step twice to capture it, as `CudaDevice` does. Later it runs nothing: a
    replay launches what was captured. `missed` has the steps that were not captured when met."""

    captures = True

    def __init__(self) -> None:
        self.captured: dict[Hashable, None] = {}
        self.missed: list[Any] = []
        self.replayed: Counter[Any] = Counter()

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        if key in self.captured:
            self.replayed[key] += 1
            return
        self.missed.append(key)
        function()

    def capture(self, key: Hashable, function: Callable[[], None]) -> None:
        assert key not in self.captured, f"{key} is captured again"
        function()
        function()
        self.captured[key] = None

    def fetch(self, source: Tensor, to: Tensor) -> None:
        assert source.device == META and source.shape == to.shape


def model(family: str, vocab: int, heads: tuple[int, int, int], **more: Any) -> ModelConfig:
    """Return a model. `heads`: number of query heads, of key heads, and their width."""
    num_heads, num_kv_heads, head_dim = heads
    settings = {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "hidden_size": num_heads * head_dim,
        "intermediate_size": 3 * num_heads * head_dim,
        "num_hidden_layers": 2,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 1,
    }
    return parse_config(settings | more, Path("made_up"))


class Size(NamedTuple):
    name: str
    target: ModelConfig
    draft: ModelConfig | None
    slots: int
    page_tokens: int
    drafts: int = 0
    dtype: torch.dtype = torch.bfloat16
    budget_tokens: int = 2048
    invariant: bool = False  # products are ours; matrices of the layers have 4 and 8 bits
    kv_cache_dtype: str = "auto"
    head: str | None = None  # the draft is a head of this kind, of the width of `draft`


LLAMA_8B = model("llama", 128256, (32, 8, 128))
LLAMA_1B = model("llama", 128256, (32, 8, 64))
QWEN3_8B, QWEN3 = (model("qwen3", 151936, (n, 8, 128)) for n in (32, 16))
ODD, ODD_SMALLER = model("llama", 50257, (12, 12, 64)), model("llama", 50000, (6, 2, 64))
BLOCKS, BLOCKS_BIASED = model("llama", 32000, (16, 4, 64)), model("qwen2", 32000, (8, 2, 64))
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 4, "intermediate_size": 256}
WINDOW = model("mixtral", 32003, (32, 8, 128), sliding_window=4096, **EXPERTS)
GEMMA = model("gemma2", 256000, (16, 8, 256), sliding_window=4096)
FP16, BF16 = torch.float16, torch.bfloat16


def with_every_option(config: ModelConfig) -> ModelConfig:
    """Return the config with all that the records of dense layers can say."""
    assert config.norm is not None
    norm = structs.replace(config.norm, centred=True, has_bias=True)
    config = config.with_mixers(
        norm=norm, qk_norm=config.norm, norms_whole=True, sinks=True, bias=True, out_bias=True
    ).with_feed_forwards(norm=norm, out_scale=0.2)
    first, last = config.layers
    forward = structs.replace(last.feed_forward, activation="relu_squared", gated=False)
    last = structs.replace(last, feed_forward=forward, parallel=True)
    return structs.replace(config, norm=norm, layers=(first, last), head_bias=True)


SIZES = (
    Size("odd vocabulary, 1 slot", ODD, ODD_SMALLER, 1, 32, 5, FP16, 72),
    Size("llama, 33 slots", LLAMA_8B, LLAMA_1B, 33, 16, 4),
    Size("qwen3, 17 slots", QWEN3_8B, QWEN3, 17, 64, 3),
    Size("window and experts, 16 slots, no draft", WINDOW, None, 16, 128, budget_tokens=777),
    Size("in blocks, 5 slots", BLOCKS, BLOCKS_BIASED, 5, 16, 2, BF16, 600, True, "fp8"),
    Size("an eagle-3 head, 17 slots", LLAMA_1B, LLAMA_1B, 17, 64, 4, head="eagle3"),
    Size("medusa heads, 5 slots", ODD, ODD, 5, 16, 3, BF16, 700, head="medusa"),
    Size("every option, 3 slots", with_every_option(GEMMA), None, 3, 64, budget_tokens=600),
)


class NoWeights(WeightSource):
    """Weights without values; those of the layers are in blocks if `stored` is given, and those of
    down projections of experts always. A head drafts the first ids."""

    file, names = "made up", frozenset(["lm_head.weight"])

    def __init__(self, dtype: torch.dtype, stored: ModelConfig | None = None) -> None:
        self._options: Any = {"dtype": dtype, "device": META}
        self._stored = stored

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, **self._options)

    def blocks(self, name: str) -> GgufTensor | None:
        if name.endswith("experts.down_proj"):
            count, hidden, inner = (
                EXPERTS["num_local_experts"],
                WINDOW.hidden_size,
                WINDOW.widest_inner,
            )
            return stored("MXFP4", count * hidden, inner)
        return None if self._stored is None else stored_matrix(self._stored, name)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    def shape_of(self, name: str) -> None:
        return None


def decoder(config: ModelConfig, size: Size) -> Decoder:
    weights = NoWeights(size.dtype, config if size.invariant else None)
    return Decoder(config, weights, size.dtype, META, "invariant" if size.invariant else "fast")


def draft_of(size: Size, target: Decoder) -> Decoder | GpuHead | None:
    if size.draft is None or size.head is None:
        return None if size.draft is None else decoder(size.draft, size)
    return head_of(size.head, target, size.draft, NoWeights(size.dtype))


def head_of(kind: Any, target: Decoder, shape: ModelConfig, weights: Any) -> GpuHead:
    reads, layers = target.config.num_layers, shape.layers[: int(kind != "medusa")]
    layer = structs.replace(shape, layers=layers)
    if kind != "medusa":
        layer = head_layer(layer, kind).with_mixers(window=None)
    config = HeadConfig(
        kind=kind,
        layer=layer,
        hidden_layers=tuple(range(reads + 1)) if kind == "eagle3" else (reads,),
        draft_vocab_size=layer.vocab_size // (2 if kind == "eagle3" else 1),
        fc_norm=True,
        fc_bias=True,
        num_heads=3,
    )
    rows = weights.get("head", (layer.vocab_size, layer.hidden_size))
    return CLASSES[kind](config, weights, target, rows)


# --- steps of every kind --------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 0.8, "verification": "coupled"},
    "rejection": {"temperature": 0.8, "verification": "rejection"},
    "looked up": {"drafter": ("ngram",)},
    "filtered": {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "log probabilities": {"logprobs": 2, "prompt_logprobs": 1},
    "shaped": {"frequency_penalty": 0.4, "logit_bias": {7: 3.0}},
    "shaped and sampled": {"temperature": 0.9, "presence_penalty": 0.5},
    "shaped and filtered": {"temperature": 0.9, "presence_penalty": 0.5, "top_k": 40},
    "structured": {"structured_outputs": StructuredOutputs(regex="(.|\n)*")},
}
_LENGTHS = (3, 1, 17, 200, 33, 16, 620, 5)  # of prompts


def requests(kind: str, count: int, size: Size) -> list[Request]:
    lengths, vocab = _LENGTHS, (size.draft or size.target).vocab_size
    period = vocab
    if kind == "looked up" or size.draft is None:  # lookups find something in the first one, too
        lengths, period = lengths[2:] + lengths[:2], 3
    return [
        make_request(
            f"{kind} {i}",
            [(31 * i + j % period) % vocab for j in range(n)],
            max_tokens=8,
            **KINDS[kind],
        )
        for i, n in zip(range(count), itertools.cycle(lengths), strict=False)
    ]


class Refused(BaseException):
    """A step that failed. No `Exception`: the step loop would recover."""


class FakedResults:
    """An executor that submits to a GPU executor, and makes up the results: half of the drafts are
    accepted."""

    def __init__(self, executor: GpuExecutor) -> None:
        self._executor, self.check = executor, executor.check
        self.steps = self.masked = 0

    def run(self, plan: StepPlan) -> StepResult:
        try:
            self._executor.run(plan)
        except Exception as error:
            raise Refused(str(error)) from error
        self.steps += 1
        self.masked += len(self._executor.host_side.masked(plan)) > 0
        accepted = plan.num_drafts // 2
        emitted = np.where(plan.wants_logits, accepted + 1, 0)
        row_splits = np.concatenate([[0], emitted.cumsum()]).astype(np.int32)
        return StepResult(
            step_id=plan.step_id,
            generations=plan.generations,
            tokens=np.full(row_splits[-1], 7, dtype=np.int32),
            row_splits=row_splits,
            num_drafted=plan.num_drafts,
            num_accepted=accepted.astype(np.int32),
            status=np.zeros(plan.num_rows, dtype=np.uint8),
        )

    def reset(self) -> None:
        raise Refused("a step failed")


class Start:
    """An executor of a size on a device of the kind `arch`, and its launches."""

    def __init__(self, size: Size, arch: str, launches: Launches) -> None:
        self.size, self.launches, self.device = size, launches, MetaDevice()
        # The drafters of requests that name none.
        self.chain = ("ngram",) if size.draft is None else ("model",)
        target, vocab = decoder(size.target, size), size.target.vocab_size
        tokenizer = TextTokenizer(printable(), "toy")
        launches.phase = "made"
        real = Tuning.of

        def tuning(heads: Any, dtype: Any, device: Any, *more: Any, **given: Any) -> Tuning:
            return real(heads, dtype, torch.device("cuda"), *more, **given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tuning, "of", tuning)
            patch.setattr(attention, "arch_of", lambda device: arch)
            patch.setattr(memory, "arch_of", lambda device: arch)
            patch.setattr(torch.cuda, "get_device_properties", lambda device: _PROCESSORS)
            patch.setattr(device_steps, "device_for", lambda device: self.device)
            self.executor = GpuExecutor(
                target,
                num_blocks=4096,
                block_size=size.page_tokens,
                max_num_seqs=size.slots,
                max_sequence_tokens=_MODEL_TOKENS + 1,
                max_num_batched_tokens=size.budget_tokens,
                draft=draft_of(size, target),
                max_drafts=size.drafts,
                lookups=LookupSettings({"ngram": NgramLookup()}, self.chain),
                grammars=Grammars(lambda: tokenizer, vocab, (0,)),
                kv_dtype=kv_dtype_of(target, size.kv_cache_dtype),
            )

    def capture(self, now: frozenset[str] = frozenset(GROUPS)) -> None:
        """Do what the executor does before it serves; kernels of groups other than `now` are
        late."""
        self.launches.phase = "captured"
        self.executor.capture(now)

    def serve(self, *kinds: str, count: int | None = None) -> FakedResults:
        """Serve `count` requests of each kind; by default twice as many as there are slots."""
        self.launches.phase = " and ".join(kinds)
        size, limits = self.size, SimpleNamespace(max_position_tokens=_MODEL_TOKENS)
        limits.vocab_size = size.target.vocab_size
        served = (requests(kind, count or 2 * size.slots, size) for kind in kinds)
        executor = FakedResults(self.executor)
        self.executor.reset()
        run_engine(
            [each for turn in zip(*served, strict=True) for each in turn],  # kinds share steps
            SimpleNamespace(config=limits),  # type: ignore[arg-type]
            SimpleNamespace(config=limits) if size.draft else None,  # type: ignore[arg-type]
            executor=executor,
            lookahead=f"fixed:{size.drafts}" if size.drafts else "off",
            num_blocks=4096,
            block_size=size.page_tokens,
            max_num_seqs=size.slots,
            max_num_batched_tokens=size.budget_tokens,
            drafter=self.chain if size.drafts else None,
            check=False,
        )
        return executor

    def late(self) -> set[str]:
        """Return the kernels that would be compiled while requests wait."""
        ahead = ("made", "captured")
        return {each.name for each in self.launches.by_key.values() if each.phase not in ahead}
