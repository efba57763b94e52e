"""Step times from data sheets: products of matrices take about as long as their arithmetic or their
memory traffic, whichever is longer (Williams et al. 2009, the roofline model).

Near the corner of the roof both count, and below it each kernel has a shortest time. So the model
adds what a data sheet leaves out, in constants of `RooflineConfig`. Each was read off kernels
that were timed alone on an H100 and an H200, or off steps of engines; a calibrated model needs none
of them. Tensor parallelism is a ring all-reduce after attention and after the MLP.
"""

from __future__ import annotations

import msgspec

from cbatch.core.prices.step_work import StepWork
from cbatch.core.request.errors import FieldError
from sim.cost.shapes import VALUE_BYTES, ModelShape, shipped


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Peak rates of one device, per second; `link_bytes_per_s` is one way. `memory_bytes` is what
    the driver reports if the source says so (ECC takes a sixteenth on some devices). `usable_bytes`
    is the smaller size that CUDA reports, since the driver reserves some; None if no run has
    reported it. `speed_8bit` is the rate of 8-bit products relative to bf16."""

    bf16_flops: float
    memory_bytes_per_s: float
    memory_bytes: int
    link_bytes_per_s: float
    source: str
    usable_bytes: int | None = None
    speed_8bit: float = 2.0


def load_gpu(name: str) -> Gpu:
    gpus = shipped("gpus.json")
    known = {key.lower(): value for key, value in gpus.items()}
    if name.lower() not in known:
        raise FieldError("--gpu", f"{name!r} is unknown", f"use one of {', '.join(sorted(gpus))}")
    return msgspec.convert(known[name.lower()], Gpu)


class RooflineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`shape` on `tensor_parallel_size` devices of type `gpu`, with a draft model or without.
    `has_filters`: requests sample with top-p, top-k or min-p. Efficiencies are the shares of the
    data sheet's peaks that good kernels reach."""

    gpu: Gpu
    shape: ModelShape
    tensor_parallel_size: int = 1
    draft: ModelShape | None = None
    has_filters: bool = False
    compute_efficiency: float = 0.68  # products of 2,048 tokens at full power: 0.66 to 0.73
    memory_efficiency: float = 0.92  # attention over 64 x 4k: 0.93; LM head of a row: 0.92
    corner: float = 1.8  # exponent of the mean; steps of 64 to 640 tokens
    product_s: float = 4e-6  # shortest time of a product; four a layer
    kernel_s: float = 2.2e-6  # of a norm, activation or write to KV
    attention_s: float = 1.1e-5  # of attention over one layer: 8.5 and 12.5 us in two engines
    # Arithmetic of prompts' attention: 0.36 of peak for 2k, 0.51 for 2k after 6k. A query takes as
    # long as this number of keys more, since tiles on the diagonal are masked.
    attention_efficiency: float = 0.62
    query_keys: float = 550.0
    sampling_passes: float = 10.0  # reads of a row of logits
    filter_passes: float = 25.0  # more of them with top-p, top-k or min-p
    step_s: float = 2e-4  # kernels that prepare a step, and the gap between steps
    # The host plans a step while the one before it runs. The longer of the two counts.
    step_host_s: float = 5e-4
    row_host_s: float = 1.5e-5
    request_host_s: float = 4e-4  # per admitted request
    link_latency_s: float = 1e-5  # per all-reduce

    def __post_init__(self) -> None:
        shape, parts = self.shape, self.tensor_parallel_size
        if parts < 1 or shape.num_attention_heads % parts:
            raise FieldError(
                "--tensor-parallel-size",
                f"{parts} does not divide {shape.num_attention_heads} attention heads",
                "use a divisor",
            )
        for field in ("compute_efficiency", "memory_efficiency", "attention_efficiency"):
            value = getattr(self, field)
            if not 0 < value <= 1:
                raise FieldError(field, f"{value!r} is not allowed", "use a number in (0, 1]")

    def kv_token_bytes(self, shape: ModelShape) -> float:
        """Return the KV bytes of a token on one device. With more devices than KV heads, several
        devices hold the same head."""
        return shape.kv_token_bytes / min(self.tensor_parallel_size, shape.num_key_value_heads)


class ModelRates:
    """Seconds of one model on its devices, per unit of work."""

    def __init__(self, config: RooflineConfig, shape: ModelShape) -> None:
        self._config, parts, layers = config, config.tensor_parallel_size, shape.num_hidden_layers
        peak_s = 1 / (config.gpu.bf16_flops * parts)
        flop_s = peak_s / config.compute_efficiency
        byte_s = 1 / (config.gpu.memory_bytes_per_s * config.memory_efficiency)
        # Matrices: arithmetic for a token, and reading what all tokens use, or all experts.
        speed = config.gpu.speed_8bit if shape.has_8bit_products else 1.0
        self.token_s = 2.0 * shape.token_weights * flop_s / speed
        # A recurrent layer reads its state by a key and a query, and adds a product to it.
        self.token_s += 6.0 * shape.recurrent_layers * shape.state_values * flop_s
        weight_s = shape.weight_bits / 8 / parts * byte_s
        self.weights_s = shape.common_weights * weight_s
        self._experts_s = shape.num_experts * shape.expert_weights * weight_s
        self._idle_share = 1 - shape.num_experts_per_tok / max(shape.num_experts, 1)
        # The LM head and sampling.
        self._logit_s = 2.0 * shape.head_weights * flop_s
        self._head_s = VALUE_BYTES * shape.head_weights / parts * byte_s
        passes = config.sampling_passes + config.filter_passes * config.has_filters
        self._sample_s = passes * VALUE_BYTES * shape.vocab_size * byte_s
        # Attention: scores and the weighted sum of values for a pair, and the KV of a position.
        width = shape.num_attention_heads * shape.head_size
        self.attention_s = shape.attention_layers * config.attention_s
        self.pair_s = 4.0 * shape.attention_layers * width * peak_s / config.attention_efficiency
        self.state_s = shape.state_page_bytes / parts * byte_s  # read for each row
        self.context_token_s = config.kv_token_bytes(shape) * byte_s
        # Small kernels and all-reduces: for a token, and their shortest times.
        kernels = 6 if shape.has_qk_norms else 4  # two norms, activation, write to KV
        self._small_token_s = layers * shape.small_token_bytes / parts * byte_s
        self._fixed_s = layers * (4 * config.product_s + kernels * config.kernel_s)
        self._fixed_s += config.product_s
        if parts > 1:  # two all-reduces a layer, each moves 2 (p - 1) / p of the activations
            moved_bytes = 2 * (parts - 1) / parts * shape.hidden_size * VALUE_BYTES
            self._small_token_s += 2 * layers * moved_bytes / config.gpu.link_bytes_per_s
            self._fixed_s += 2 * layers * config.link_latency_s

    def roof(self, arithmetic_s: float, memory_s: float) -> float:
        """Return a smooth maximum: a power mean without the division."""
        corner = self._config.corner
        return float((arithmetic_s**corner + memory_s**corner) ** (1 / corner))

    def matrices_s(self, tokens: float, logit_tokens: float) -> float:
        """Return the seconds of one pass without its attention."""
        read_s = self.weights_s
        if self._experts_s:
            read_s += self._experts_s * (1 - self._idle_share**tokens)
        seconds = self._fixed_s + self._small_token_s * tokens
        seconds += self.roof(self.token_s * tokens, read_s)
        if logit_tokens:
            seconds += self.roof(self._logit_s * logit_tokens, self._head_s)
            seconds += self._sample_s * logit_tokens
        return seconds


class Roofline:
    """The cost model (see `sim.cost.base`) of a `RooflineConfig`."""

    def __init__(self, config: RooflineConfig) -> None:
        self._config = config
        self._target = ModelRates(config, config.shape)
        self._draft = None if config.draft is None else ModelRates(config, config.draft)
        # Token counts of the latest step and their time: most steps repeat the counts.
        self._tokens: tuple[int, int] | None = None
        self._matrices_s = 0.0

    def step_s(self, work: StepWork) -> tuple[float, float, float]:
        target, config = self._target, self._config
        tokens = work.target_tokens, work.logit_tokens
        if tokens != self._tokens:
            self._tokens, self._matrices_s = tokens, target.matrices_s(*tokens)
        prompts = work.rows - work.decode_rows  # these write states, too
        seconds = config.step_s + self._matrices_s
        seconds += target.state_s * (work.decode_rows + 2 * prompts)
        if work.decode_rows:
            pairs_s = target.pair_s * work.decode_pairs
            read_s = target.context_token_s * (work.context_tokens - work.prefill_context_tokens)
            seconds += target.attention_s + (pairs_s if pairs_s > read_s else read_s)
        if work.prefill_tokens:  # a kernel of its own, after the decoding rows' kernel
            pairs = work.prefill_pairs + config.query_keys * work.prefill_tokens
            seconds += target.attention_s + target.pair_s * pairs
        draft_s = 0.0
        if work.draft_depth or work.ingested_tokens:
            draft_s = self._draft_s(work)
        host_s = config.step_host_s + config.row_host_s * work.rows
        host_s += config.request_host_s * work.admitted
        return draft_s, seconds, max(host_s - draft_s - seconds, 0.0)

    def _draft_s(self, work: StepWork) -> float:
        """Return the seconds of sequential draft passes. The first pass also ingests tokens that
        the draft has not read. Rows with fewer drafts than the deepest row leave early, so a pass
        has on average `draft_tokens / depth` rows."""
        draft = self._draft
        if draft is None:
            return 0.0
        depth = max(work.draft_depth, 1)
        rows, read_tokens = work.draft_tokens / depth, work.draft_context_tokens
        attention_s = draft.attention_s + draft.context_token_s * read_tokens
        first_s = draft.matrices_s(rows + work.ingested_tokens, rows) + attention_s
        return first_s + (depth - 1) * (draft.matrices_s(rows, rows) + attention_s)
