"""The number of KV blocks that vLLM allocates on a device, computed by its own rules.

vLLM takes a share of the memory that CUDA reports. It subtracts the weights, the peak of one
profiling run, and the process's memory outside torch, and cuts the remainder into blocks. The peak
is the larger of two: activations of the largest step, and the sampler on one row of logits per
slot. Since 0.21 vLLM also reserves memory for CUDA graphs, and its top-p needs no sort.

Three numbers are fitted, each to one run (on an L20, an A5000 and an A100), and one is typical of
four logs. The others come from vLLM's code. The memory of a draft model follows cbatch's own rule.

The number can also be read from a record of a run: a JSON document with `num_gpu_blocks` at any
depth (a benchmark's description of its engine), the gauge `cache_config_info` of vLLM's metrics, or
its log.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from cbatch.core.request.errors import FieldError
from sim.cost.roofline import RooflineConfig
from sim.cost.shapes import VALUE_BYTES, ModelShape
from sim.workload.traces.files import read_whole

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
    state_pages: int = 0

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
    kv_bytes = settings.gpu_memory_utilization * total_bytes - weight_bytes - reserved
    kv_bytes -= settings.state_pages * config.shape.state_page_bytes / num_devices
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
    width = shape.mlp_size / num_devices
    rows = min(settings.max_rows, settings.step_tokens)
    sampler_bytes = hidden_bytes + rules.sampler_value_bytes * rows * shape.vocab_size
    # While the MLP runs: gate, up and their product, and three inputs and outputs of the layer.
    pass_bytes = 3 * (settings.step_tokens * VALUE_BYTES * width + hidden_bytes)
    total_graph_bytes = num_graphs(settings.max_rows) * rules.graph_bytes
    return max(pass_bytes, sampler_bytes) + total_graph_bytes + rules.context_bytes


def num_graphs(max_rows: int) -> int:
    """Return how many CUDA graphs vLLM captures. Graphs of mixed steps go up to 2 * `max_rows`
    tokens, at most 512; graphs of decode-only steps go up to `max_rows`."""
    max_mixed_tokens = min(2 * max_rows, 512)
    sizes: list[int] = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    return len([s for s in sizes if s <= max_mixed_tokens]) + len(
        [s for s in sizes if s <= max_rows]
    )


# -- of a recorded run

_BLOCKS = re.compile(
    r"(?:# (?:GPU|CUDA|cuda) blocks: |num_gpu_blocks(?: is: |=\"|=|\": ?))([\d,]*\d)"
)
_SIZE = re.compile(r"block_size(?:=\"|=|\": ?)(\d+)")
_TOKENS = re.compile(r"GPU KV cache size: ([\d,]+) tokens")


def recorded_blocks(path: Path, block_tokens: int | None) -> tuple[int, int]:
    """Return the number of blocks and the tokens per block. The last mention of each counts: a
    restarted engine has another pool. A record without a block size gets `block_tokens`, or 16 if
    that is None. Raises `FieldError`."""
    try:
        text = read_whole(path).decode("utf-8", errors="replace")
    except OSError as error:
        problem = f"{path} cannot be read ({error.strerror or error})"
        remedy = f"name a file of a recorded run, or one of {', '.join(RULES)}"
        raise FieldError("--pool", problem, remedy) from error
    blocks, tokens, own = (_last(pattern, text) for pattern in (_BLOCKS, _TOKENS, _SIZE))
    if blocks is None and tokens is None:
        remedy = "name a vLLM log, its metrics or a JSON document with num_gpu_blocks"
        raise FieldError("--pool", f"{path} does not say the number of KV blocks", remedy)
    if own is None and blocks and tokens and tokens % blocks == 0:
        own = tokens // blocks
    if own is not None and block_tokens is not None and own != block_tokens:
        problem = f"{block_tokens} differs from that of {path}"
        raise FieldError("--block-size", problem, f"use {own}, or leave it out")
    size = own or block_tokens or 16
    blocks = (tokens or 0) // size if blocks is None else blocks
    if blocks < 1:
        raise FieldError("--pool", f"{path} has no blocks", "record a run that started")
    return blocks, size


def _last(pattern: re.Pattern[str], text: str) -> int | None:
    matches = pattern.findall(text)
    return int(matches[-1].replace(",", "")) if matches else None
