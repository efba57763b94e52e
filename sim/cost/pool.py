"""How many KV blocks vLLM keeps on a device, from its own rules.

It takes a share of what CUDA reports as the device's memory, less the weights, less what one
profiling run needs at its peak, less what the process holds beside torch. What is left is cut into
blocks. The peak is the larger of two: the largest step's pass, and the sampler on a row of logits
for every slot. Since 0.21 what CUDA graphs will take is kept as well, and top-p needs no sort.

Three numbers are fitted, each to one run (`FITTED`); the others are read in vLLM's code. Drafts
beside the target are ours: vLLM is not asked how it keeps theirs.
"""

from __future__ import annotations

from typing import NamedTuple

from cbatch.core.request.errors import FieldError
from sim.cost.roofline import VALUE_BYTES, ModelShape, RooflineConfig

MEMORY_SHARE = 0.9
MIB = 2**20


class PoolRules(NamedTuple):
    """Of some versions of vLLM."""

    sampler_value_bytes: float  # at the sampler's peak, of each logit
    graph_bytes: float  # kept for each CUDA graph
    context_bytes: float  # beside torch: modules that are loaded late, libraries


# 38.2: a profiling run's peak of 1.40 GiB on an L20, Qwen3-8B, 256 slots, 2,048 tokens, sorting:
# bf16 and fp32 logits, sorted values, their indices, and the sort's own buffers. 14: logits in bf16
# and fp32, probabilities and noise. 6.19 MiB: 0.52 GiB estimated for 86 graphs on an A5000, 0.21.0.
# 48 MiB: four logs of 0.10 to 0.15 say 0.02 to 0.07 GiB. 0.30 GiB: an A100, 0.31.0, said 15.26 GiB
# for weights of 14.96 and what is beside torch.
RULES = {
    "vllm-0.19": PoolRules(38.2, 0.0, 48 * MIB),
    "vllm-0.21": PoolRules(14.0, 6.19 * MIB, 307 * MIB),
}
FITTED = {"vllm-0.19": ("L20",), "vllm-0.21": ("A5000", "A100")}
DEFAULT_RULES = "vllm-0.21"


class PoolSettings(NamedTuple):
    """Of the engine whose pool is foretold: `max_num_batched_tokens`, `max_num_seqs` and
    `gpu_memory_utilization` of vLLM."""

    block_tokens: int = 16
    step_tokens: int = 2048
    max_rows: int = 256
    memory_share: float = MEMORY_SHARE
    rules: str = DEFAULT_RULES

    def check(self) -> None:
        """Raises `FieldError`."""
        if self.rules not in RULES:
            remedy = f"use one of {', '.join(RULES)}"
            raise FieldError("--pool", f"{self.rules!r} is unknown", remedy)
        if not 0 < self.memory_share <= 1:
            raise FieldError(
                "--memory-share", f"{self.memory_share!r} is not allowed", "use a number in (0, 1]"
            )


def pool_blocks(config: RooflineConfig, settings: PoolSettings | None = None) -> int:
    """KV blocks on each device, of target and draft together. Raises `FieldError`."""
    settings = settings or PoolSettings()
    shapes = [config.shape, *([config.draft] if config.draft else [])]
    gpu, parts = config.gpu, config.tensor_parallel
    total_bytes = gpu.memory_bytes if gpu.usable_bytes is None else gpu.usable_bytes
    weight_bytes = sum(shape.weight_bytes for shape in shapes) / parts
    kept = max(kept_bytes(shape, settings, parts) for shape in shapes)
    token_bytes = sum(config.kv_token_bytes(shape) for shape in shapes)
    settings.check()
    left_bytes = settings.memory_share * total_bytes - weight_bytes - kept
    blocks = int(left_bytes // (token_bytes * settings.block_tokens))
    if blocks < 1:
        raise FieldError(
            "--gpu",
            f"{weight_bytes / 2**30:.1f} GiB of weights and {kept / 2**30:.1f} of work leave no "
            "room for KV",
            "use more devices (--tensor-parallel) or a larger one",
        )
    return blocks


def kept_bytes(shape: ModelShape, settings: PoolSettings, tensor_parallel: int = 1) -> float:
    """On each device beside the weights. Every device samples from whole rows of logits."""
    settings.check()
    rules = RULES[settings.rules]
    hidden_bytes = settings.step_tokens * shape.hidden_size * VALUE_BYTES
    rows = min(settings.max_rows, settings.step_tokens)
    sampler_bytes = hidden_bytes + rules.sampler_value_bytes * rows * shape.vocab_size
    pass_bytes = settings.step_tokens * pass_token_bytes(shape, tensor_parallel)
    graphs = num_graphs(settings.max_rows) * rules.graph_bytes
    return max(pass_bytes, sampler_bytes) + graphs + rules.context_bytes


def pass_token_bytes(shape: ModelShape, tensor_parallel: int = 1) -> float:
    """Of each token while its MLP runs: what gate, up and their product are, and three of the
    layer's inputs and outputs."""
    return VALUE_BYTES * (3 * shape.intermediate_size / tensor_parallel + 3 * shape.hidden_size)


def num_graphs(max_rows: int) -> int:
    """That vLLM captures: of mixed steps by size up to twice as many tokens as there are slots (512
    at most), of steps that only decode up to as many."""
    most = min(2 * max_rows, 512)
    sizes: list[int] = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    return len([s for s in sizes if s <= most]) + len([s for s in sizes if s <= max_rows])
