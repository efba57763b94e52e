"""Step times from data sheets: a group of operations takes as long as its arithmetic or its memory
traffic, whichever is longer (Williams et al. 2009, the roofline model).

The model covers dense decoder-only transformers with gated MLPs and grouped-query attention, with
weights and KV in 16 bit. Tensor parallelism is a ring all-reduce after attention and after the MLP.
A config.json with a mixture of experts, latent attention or quantised weights is refused by name.
The efficiencies and constants of `RooflineConfig` cover what the roofline leaves out: kernels below
their limits, launch gaps, host work. A calibrated model needs none of them.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cbatch.core.prices.step_work import StepWork
from cbatch.core.request.errors import FieldError
from sim.workload.traces.files import read_whole

VALUE_BYTES = 2  # bf16
_UNSUPPORTED = {  # by field of config.json: the feature that is refused
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "kv_lora_rank": "latent attention",
    "quantization_config": "quantised weights",
}


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Peak rates of one device, per second; `link_bytes_per_s` is one way. `memory_bytes` is what
    the driver reports if the source says so (ECC takes a sixteenth on some devices). `usable_bytes`
    is the smaller size that CUDA reports, since the driver reserves some; None if no run has
    reported it."""

    bf16_flops: float
    memory_bytes_per_s: float
    memory_bytes: int
    link_bytes_per_s: float
    source: str
    usable_bytes: int | None = None


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a Hugging Face config.json that determine the cost of a step."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int = 131072
    head_dim: int | None = None
    tie_word_embeddings: bool = False

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def layer_weights(self) -> int:
        """Return the number of weights in the matrices of all layers."""
        hidden, head = self.hidden_size, self.head_size
        attention = hidden * head * (2 * self.num_attention_heads + 2 * self.num_key_value_heads)
        return self.num_hidden_layers * (attention + 3 * hidden * self.intermediate_size)

    @property
    def head_weights(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def weight_bytes(self) -> int:
        embeddings = self.head_weights * (1 if self.tie_word_embeddings else 2)
        return VALUE_BYTES * (self.layer_weights + embeddings)

    @property
    def kv_token_bytes(self) -> int:
        heads = 2 * self.num_key_value_heads
        return VALUE_BYTES * self.num_hidden_layers * heads * self.head_size


def gpu_names() -> list[str]:
    return sorted(_shipped("gpus.json"))


def load_gpu(name: str) -> Gpu:
    known = {key.lower(): value for key, value in _shipped("gpus.json").items()}
    if name.lower() not in known:
        raise FieldError("--gpu", f"{name!r} is unknown", f"use one of {', '.join(gpu_names())}")
    return msgspec.convert(known[name.lower()], Gpu)


def load_shape(model: str) -> ModelShape:
    """Return the shape of a model. `model` is the name of a shipped shape, the path of a
    config.json, or its folder. Raises `FieldError`."""
    shipped = _shipped("models.json")
    if model.lower() in shipped:
        return msgspec.convert(shipped[model.lower()], ModelShape)
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(read_whole(path))
        for field, what in _UNSUPPORTED.items():
            if config.get(field):
                raise FieldError("--model", f"{path}: {field}: {what}", "give a dense 16-bit model")
        config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
        return msgspec.convert(config, ModelShape)
    except FieldError:
        raise
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        known = ", ".join(sorted(shipped))
        raise FieldError(
            "--model",
            f"{model!r} is neither a known shape nor a config.json ({error})",
            f"name one of {known}, or the folder of a model",
        ) from error


def _shipped(name: str) -> dict[str, Any]:
    text = resources.files("sim").joinpath("specs", name).read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


class Rates(NamedTuple):
    """Seconds of one model on its devices, per unit of work."""

    token_s: float  # arithmetic of all layers for one token
    weights_s: float  # reading the layers' weights once
    logit_s: float  # arithmetic of the LM head for one row
    head_s: float  # reading the LM head's weights once
    fixed_s: float  # small kernels and the latency of all-reduces, per pass
    exchange_token_s: float  # all-reduces of all layers for one token
    pair_s: float  # arithmetic of attention for one query-key pair
    context_token_s: float  # reading the KV of one position

    def attention_s(self, pairs: float, context_tokens: float) -> float:
        return max(self.pair_s * pairs, self.context_token_s * context_tokens)

    def matrices_s(self, tokens: float, logit_tokens: float) -> float:
        """Return the seconds of one pass without its attention."""
        seconds = self.fixed_s + (
            max(self.token_s * tokens, self.weights_s) + self.exchange_token_s * tokens
        )
        if logit_tokens:
            seconds += max(self.logit_s * logit_tokens, self.head_s)
        return seconds


class RooflineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`shape` on `tensor_parallel_size` devices of type `gpu`, with a draft model or without.

    Efficiencies are the shares of the data sheet's peaks that good kernels reach. `layer_s` is the
    time of a layer's small kernels: norms, rotations, launches inside a captured graph."""

    gpu: Gpu
    shape: ModelShape
    tensor_parallel_size: int = 1
    draft: ModelShape | None = None
    compute_efficiency: float = 0.7
    memory_efficiency: float = 0.8
    layer_s: float = 8e-6
    step_host_s: float = 5e-4  # scheduler, input preparation, sampling
    request_host_s: float = 2e-4  # per admitted request
    link_latency_s: float = 1e-5  # per all-reduce

    def __post_init__(self) -> None:
        shape, parts = self.shape, self.tensor_parallel_size
        if parts < 1 or shape.num_attention_heads % parts:
            raise FieldError(
                "--tensor-parallel-size",
                f"{parts} does not divide {shape.num_attention_heads} attention heads",
                "use a divisor",
            )
        for field, value in (
            ("compute_efficiency", self.compute_efficiency),
            ("memory_efficiency", self.memory_efficiency),
        ):
            if not 0 < value <= 1:
                raise FieldError(field, f"{value!r} is not allowed", "use a number in (0, 1]")

    def kv_token_bytes(self, shape: ModelShape) -> float:
        """Return the KV bytes of a token on one device. With more devices than KV heads, several
        devices hold the same head."""
        return shape.kv_token_bytes / min(self.tensor_parallel_size, shape.num_key_value_heads)

    def rates(self, shape: ModelShape) -> Rates:
        parts, layers = self.tensor_parallel_size, shape.num_hidden_layers
        flop_s = 1 / (self.gpu.bf16_flops * self.compute_efficiency * parts)
        byte_s = 1 / (self.gpu.memory_bytes_per_s * self.memory_efficiency)
        width = shape.num_attention_heads * shape.head_size
        fixed_s, exchange_token_s = self.layer_s * layers, 0.0
        if parts > 1:  # two all-reduces a layer, each moves 2 (p - 1) / p of the activations
            moved_bytes = 2 * (parts - 1) / parts * shape.hidden_size * VALUE_BYTES
            exchange_token_s = 2 * layers * moved_bytes / self.gpu.link_bytes_per_s
            fixed_s += 2 * layers * self.link_latency_s
        return Rates(
            token_s=2.0 * shape.layer_weights * flop_s,
            weights_s=VALUE_BYTES * shape.layer_weights / parts * byte_s,
            logit_s=2.0 * shape.head_weights * flop_s,
            head_s=VALUE_BYTES * shape.head_weights / parts * byte_s,
            fixed_s=fixed_s,
            exchange_token_s=exchange_token_s,
            pair_s=4.0 * layers * width * flop_s,  # scores, and the weighted sum of values
            context_token_s=self.kv_token_bytes(shape) * byte_s,
        )


class Roofline:
    """The cost model (see `sim.cost.base`) of a `RooflineConfig`."""

    def __init__(self, config: RooflineConfig) -> None:
        self._config = config
        self._target = config.rates(config.shape)
        self._draft = None if config.draft is None else config.rates(config.draft)
        # Token counts of the latest step and their time: most steps repeat the counts.
        self._tokens: tuple[int, int] | None = None
        self._matrices_s = 0.0

    def step_s(self, work: StepWork) -> tuple[float, float, float]:
        target, host_s = self._target, self._config.step_host_s
        tokens = work.target_tokens, work.logit_tokens
        if tokens != self._tokens:
            self._tokens, self._matrices_s = tokens, target.matrices_s(*tokens)
        pairs_s = target.pair_s * work.decode_pairs
        read_s = target.context_token_s * (work.context_tokens - work.prefill_context_tokens)
        seconds = self._matrices_s + (pairs_s if pairs_s > read_s else read_s)
        if work.prefill_tokens:  # a kernel of its own, after the decoding rows' kernel
            seconds += target.attention_s(work.prefill_pairs, work.prefill_context_tokens)
        if work.admitted:
            host_s += self._config.request_host_s * work.admitted
        if not (work.draft_depth or work.ingested_tokens):
            return 0.0, seconds, host_s
        return self._draft_s(work), seconds, host_s

    def _draft_s(self, work: StepWork) -> float:
        """Return the seconds of sequential draft passes. The first pass also ingests tokens that
        the draft has not read. Rows with fewer drafts than the deepest row leave early, so a pass
        has on average `draft_tokens / depth` rows."""
        if self._draft is None:
            return 0.0
        depth = max(work.draft_depth, 1)
        rows, read_tokens = work.draft_tokens / depth, work.draft_context_tokens
        attention_s = self._draft.attention_s(read_tokens, read_tokens)
        first_s = self._draft.matrices_s(rows + work.ingested_tokens, rows) + attention_s
        return first_s + (depth - 1) * (self._draft.matrices_s(rows, rows) + attention_s)
