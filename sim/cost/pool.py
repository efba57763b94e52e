"""The number of KV blocks that vLLM allocates on a device, computed by its own rules.

vLLM takes a share of the memory that CUDA reports. It subtracts the weights, the peak of one
profiling run, and the process's memory outside torch, and cuts the remainder into blocks. The peak
is the larger of two: activations of the largest step, and the sampler on one row of logits per
slot. Since 0.21 vLLM also reserves memory for CUDA graphs, and its top-p needs no sort.

Three numbers are fitted, each to one run (on an L20, an A5000 and an A100), and one is typical of
four logs. The others come from vLLM's code. The memory of a draft model follows cbatch's own rule.
"""

from __future__ import annotations

from typing import NamedTuple

from cbatch.core.request.errors import FieldError
from sim.cost.roofline import VALUE_BYTES, ModelShape, RooflineConfig

MEMORY_SHARE = 0.9  # default of `gpu_memory_utilization`
MIB = 2**20


class PoolRules(NamedTuple):
    """Memory constants of a range of vLLM versions."""

    sampler_value_bytes: float  # per logit, at the sampler's peak
    graph_bytes: float  # reserved per CUDA graph
    context_bytes: float  # outside torch: modules that are loaded late, libraries


RULES = {
    "vllm-0.19": PoolRules(
        # bf16 and fp32 logits, sorted values, indices and the sort's buffers: fitted to a peak of
        # 1.40 GiB (L20, Qwen3-8B, 256 slots, 2,048 tokens).
        sampler_value_bytes=38.2,
        graph_bytes=0.0,
        context_bytes=48 * MIB,  # four logs of versions 0.10 to 0.15 report 0.02 to 0.07 GiB
    ),
    "vllm-0.21": PoolRules(
        sampler_value_bytes=14.0,  # bf16 and fp32 logits, probabilities and noise
        graph_bytes=6.19 * MIB,  # 0.21.0 estimated 0.52 GiB for 86 graphs on an A5000
        # An A100 with 0.31.0 reported 15.26 GiB, of which the weights were 14.96 GiB.
        context_bytes=307 * MIB,
    ),
}
DEFAULT_RULES = "vllm-0.21"


class PoolSettings(NamedTuple):
    """Settings of the engine whose pool is computed: vLLM's `max_num_batched_tokens`
    (`step_tokens`), `max_num_seqs` (`max_rows`) and `gpu_memory_utilization`."""

    block_tokens: int = 16
    step_tokens: int = 2048
    max_rows: int = 256
    gpu_memory_utilization: float = MEMORY_SHARE
    rules: str = DEFAULT_RULES

    def check(self) -> None:
        """Raises `FieldError` for an unknown rule or a memory share outside (0, 1]."""
        if self.rules not in RULES:
            remedy = f"use one of {', '.join(RULES)}"
            raise FieldError("--pool", f"{self.rules!r} is unknown", remedy)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise FieldError(
                "--gpu-memory-utilization",
                f"{self.gpu_memory_utilization!r} is not allowed",
                "use a number in (0, 1]",
            )


def pool_blocks(config: RooflineConfig, settings: PoolSettings | None = None) -> int:
    """Return the number of KV blocks on each device; a block holds KV of target and draft. Raises
    `FieldError` if not even one block fits."""
    settings = settings or PoolSettings()
    shapes = [config.shape, *([config.draft] if config.draft else [])]
    gpu, num_devices = config.gpu, config.tensor_parallel_size
    total_bytes = gpu.memory_bytes if gpu.usable_bytes is None else gpu.usable_bytes
    weight_bytes = sum(shape.weight_bytes for shape in shapes) / num_devices
    reserved = max(reserved_bytes(shape, settings, num_devices) for shape in shapes)
    token_bytes = sum(config.kv_token_bytes(shape) for shape in shapes)
    settings.check()
    kv_bytes = settings.gpu_memory_utilization * total_bytes - weight_bytes - reserved
    blocks = int(kv_bytes // (token_bytes * settings.block_tokens))
    if blocks < 1:
        raise FieldError(
            "--gpu",
            f"{weight_bytes / 2**30:.1f} GiB of weights and {reserved / 2**30:.1f} GiB for a step "
            "leave no room for KV",
            "use more devices (--tensor-parallel-size) or a larger one",
        )
    return blocks


def reserved_bytes(shape: ModelShape, settings: PoolSettings, num_devices: int = 1) -> float:
    """Return the bytes that vLLM reserves on each device in addition to the weights. Every device
    samples from whole rows of logits."""
    settings.check()
    rules = RULES[settings.rules]
    hidden_bytes = settings.step_tokens * shape.hidden_size * VALUE_BYTES
    rows = min(settings.max_rows, settings.step_tokens)
    sampler_bytes = hidden_bytes + rules.sampler_value_bytes * rows * shape.vocab_size
    pass_bytes = settings.step_tokens * pass_token_bytes(shape, num_devices)
    total_graph_bytes = num_graphs(settings.max_rows) * rules.graph_bytes
    return max(pass_bytes, sampler_bytes) + total_graph_bytes + rules.context_bytes


def pass_token_bytes(shape: ModelShape, tensor_parallel_size: int = 1) -> float:
    """Return the activation bytes per token while the MLP runs: gate, up and their product, and
    three inputs and outputs of the layer."""
    return VALUE_BYTES * (
        3 * shape.intermediate_size / tensor_parallel_size + 3 * shape.hidden_size
    )


def num_graphs(max_rows: int) -> int:
    """Return how many CUDA graphs vLLM captures. Graphs of mixed steps go up to 2 * `max_rows`
    tokens, at most 512; graphs of decode-only steps go up to `max_rows`."""
    max_mixed_tokens = min(2 * max_rows, 512)
    sizes: list[int] = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    return len([s for s in sizes if s <= max_mixed_tokens]) + len(
        [s for s in sizes if s <= max_rows]
    )
