"""The KV pool of an engine that ran: its number of blocks, read from a record of the run.

Records are vLLM's own: a JSON document with `num_gpu_blocks` at any depth (a benchmark's
description of its engine), the gauge `cache_config_info` of its metrics, or its log.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from cbatch.core.request.errors import FieldError
from sim.cost.pool import RULES
from sim.workload.traces.files import read_whole

_BLOCKS = re.compile(r"(?:# (?:GPU|CUDA|cuda) blocks: |num_gpu_blocks(?: is: |=\"|=))([\d,]+)")
_SIZE = re.compile(r"block_size(?:=\"|=)(\d+)")
_TOKENS = re.compile(r"GPU KV cache size: ([\d,]+) tokens")


class RecordedPool(NamedTuple):
    """A pool as a record gives it: `blocks` of `block_tokens` tokens each, or only the number of
    `tokens`. None marks a number that the record lacks."""

    blocks: int | None
    block_tokens: int | None
    tokens: int | None = None


def recorded_blocks(path: Path, block_tokens: int | None) -> tuple[int, int]:
    """Return the number of blocks and the tokens per block. A record without a block size gets
    `block_tokens`, or 16 if that is None. Raises `FieldError`."""
    try:
        text = read_whole(path).decode("utf-8", errors="replace")
    except OSError as error:
        problem = f"{path} cannot be read ({error.strerror or error})"
        remedy = f"name a file of a recorded run, or one of {', '.join(RULES)}"
        raise FieldError("--pool", problem, remedy) from error
    pool = _of_json(text) or _of_text(text)
    if pool is None:
        remedy = "name a vLLM log, its metrics or a JSON document with num_gpu_blocks"
        raise FieldError("--pool", f"{path} does not say the number of KV blocks", remedy)
    own = pool.block_tokens
    if own is not None and block_tokens is not None and own != block_tokens:
        raise FieldError(
            "--block-size",
            f"{block_tokens} differs from that of {path}",
            f"use {own}, or leave it out",
        )
    size = own or block_tokens or 16
    blocks = pool.blocks if pool.blocks is not None else (pool.tokens or 0) // size
    if blocks < 1:
        raise FieldError("--pool", f"{path} has no blocks", "record a run that started")
    return blocks, size


def _of_json(text: str) -> RecordedPool | None:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    engine = _find_engine(document)
    if engine is None:
        return None
    size = engine.get("block_size")
    return RecordedPool(engine["num_gpu_blocks"], size if _is_count(size) else None)


def _find_engine(value: Any) -> dict[str, Any] | None:
    """Return the first object, depth first, that has a number `num_gpu_blocks`."""
    if isinstance(value, dict):
        if _is_count(value.get("num_gpu_blocks")):
            return value
        value = list(value.values())
    if isinstance(value, list):
        return next((holder for part in value if (holder := _find_engine(part))), None)
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _of_text(text: str) -> RecordedPool | None:
    """Read a log or metrics. The last mention counts: a restarted engine has another pool."""
    blocks, tokens, size = (_last(pattern, text) for pattern in (_BLOCKS, _TOKENS, _SIZE))
    if blocks is None and tokens is None:
        return None
    if size is None and blocks and tokens and tokens % blocks == 0:
        size = tokens // blocks
    return RecordedPool(blocks, size, tokens)


def _last(pattern: re.Pattern[str], text: str) -> int | None:
    matches = pattern.findall(text)
    return int(matches[-1].replace(",", "")) if matches else None
