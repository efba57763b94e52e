"""Options of a scheduler and its steps that engines and simulations have in common."""

from __future__ import annotations

from functools import partial

from cbatch.core.request.typed import knob

_engine = partial(knob, "engine")
LOOKAHEAD = _engine(
    "off, adaptive, ema or fixed; ema:K drafts at most K tokens, fixed:K always K; module:Class is "
    "a policy of your own",
    "POLICY",
    type=str,
)
TENSOR_PARALLEL_SIZE = _engine(
    "number of ranks (CPU processes) among which the model is sharded",
    "N",
    aliases=("tp",),
    default=1,
)
MAX_NUM_SEQS = _engine("maximum number of sequences in a step", "N")
NUM_BLOCKS = _engine(
    "number of KV blocks", "N", aliases=("num_gpu_blocks_override",), default="as memory allows"
)
BLOCK_SIZE = _engine("tokens per KV block", "TOKENS", default="64 on a GPU, else 16")
MAX_MODEL_LEN = _engine("maximum length of a sequence", "TOKENS", default="the model's")
MAX_NUM_BATCHED_TOKENS = _engine("maximum number of tokens in a step", "TOKENS")
ITL_TARGET = _engine(
    "target for the gap between two tokens of a sequence while prompts are computed",
    "SECONDS",
    name="itl_target",
)
SCHEDULING_POLICY = _engine("order in which requests get a slot", name="scheduling_policy")
ENABLE_PREFIX_CACHING = _engine("share the KV of equal prompt prefixes")
GPU_MEMORY_UTILIZATION = _engine("maximum share of a device's memory", "SHARE")
