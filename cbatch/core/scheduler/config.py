"""Configuration of the scheduler."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from cbatch.core.prices.chunk_sizes import PROMPT_SHARE
from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.request.errors import FieldError, too_long
from cbatch.core.request.request import (
    DRAFTERS,
    MAX_SALT_CHARS,
    MODEL,
    Request,
    SamplingParams,
    is_chain,
)
from cbatch.core.speculation.config import LookaheadConfig

QueuePolicy = Literal["fcfs", "priority", "shortest"]


class SchedulerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes and policies of a scheduler. Raises `FieldError` naming the field."""

    num_blocks: int
    block_size: int = 16
    num_state_pages: int = 0  # for the states of recurrent layers; 0: the model has none
    # Blocks between two boundaries of a sequence whose state pages enter the prefix cache.
    state_interval: int = 32
    max_num_seqs: int = 64  # sequences that run at once
    max_model_len: int = 2048  # context: prompt and output together
    max_num_batched_tokens: int = 2048  # target tokens and draft catch-up tokens in one step
    # Cost of a catch-up token of the draft model, in target tokens. A step's budget for prompts is
    # smaller by the cost of its catch-up tokens.
    catch_up_price: float = 1.0
    vocab_size: int = 2**31 - 1
    eos_ids: tuple[int, ...] = ()
    queue_policy: QueuePolicy = "fcfs"
    # Advance of a waiting request per second: levels under `priority`, tokens under `shortest`.
    ageing_per_s: float | None = None  # None: 0 (strict) under `priority`, 64 under `shortest`
    enable_prefix_caching: bool = True
    kv_events: bool = False  # record the blocks that enter and leave the prefix cache
    decode_reserve_tokens: int = 16  # free KV positions beyond the prompt, required for admission
    draft_context_tokens: int | None = None  # the draft model's context; None: no draft model
    draft_lags: bool = True  # False for a draft head, which never catches up with the target
    # Drafters of a request that names none, preferred first. None: the draft model; without a draft
    # model, k is always 0.
    drafter: tuple[str, ...] | None = None
    lookahead: LookaheadConfig = LookaheadConfig()
    cost_profile: CostProfile | None = None  # first prices of steps; None: all are learned
    # While rows decode, a chunk is the smallest that keeps this share of the best prompt
    # throughput. With 1 a chunk may fill the step's budget, and decoding rows wait longer.
    prompt_share: float = PROMPT_SHARE
    itl_target_s: float | None = None  # target gap between tokens of a row; None: no target
    min_itl_target_s: float = 0.0  # a request's own shorter target is raised to this

    def __post_init__(self) -> None:
        checks = (
            ("num_blocks", self.num_blocks >= 1, "give at least 1 block"),
            ("block_size", self.block_size >= 1, "give at least 1 token"),
            ("num_state_pages", self.num_state_pages >= 0, "give 0 or more"),
            ("state_interval", self.state_interval >= 1, "give at least 1 block"),
            ("max_num_seqs", self.max_num_seqs >= 1, "give at least 1 slot"),
            ("max_model_len", self.max_model_len >= 2, "give 2 or more: prompt and output"),
            (
                "max_num_batched_tokens",
                self.max_num_batched_tokens >= self.max_num_seqs,
                "give at least max_num_seqs, so that every running sequence gets its token",
            ),
            ("catch_up_price", 0 <= self.catch_up_price <= 1, "use a number in [0, 1]"),
            ("decode_reserve_tokens", self.decode_reserve_tokens >= 1, "give at least 1"),
            (
                "kv_events",
                self.enable_prefix_caching or not self.kv_events,
                "enable the prefix cache",
            ),
            ("ageing_per_s", (self.ageing_per_s or 0) >= 0, "give 0 or more"),
            ("prompt_share", 0 < self.prompt_share <= 1, "give a share above 0, at most 1"),
            (
                "itl_target_s",
                self.itl_target_s is None or self.itl_target_s > 0,
                "give seconds above 0, or leave it out",
            ),
            ("min_itl_target_s", self.min_itl_target_s >= 0, "give seconds, or leave it out"),
            (
                "drafter",
                self.drafter is None or is_chain(self.drafter),
                f"name one or more of {', '.join(DRAFTERS)}, each once",
            ),
        )
        for field, ok, remedy in checks:
            if not ok:
                raise FieldError(field, f"{getattr(self, field)!r} is not allowed", remedy)
        if MODEL in self.default_chain and self.draft_context_tokens is None:
            raise FieldError("drafter", "'model' needs a draft", "give the draft, or leave it out")

    @property
    def default_chain(self) -> tuple[str, ...]:
        """Return the drafters of a request that names none, preferred first."""
        if self.drafter is not None:
            return self.drafter
        return () if self.draft_context_tokens is None else (MODEL,)

    @property
    def max_sequence_tokens(self) -> int:
        """Return the length of the longest sequence that fits context and pool."""
        return min(self.max_model_len, self.num_blocks * self.block_size)

    def check_request(self, request: Request, output: tuple[int, ...] = ()) -> np.ndarray:
        """Return the tokens of the prompt and of `output`, the output so far, as int32.

        Raises `FieldError` or `RefusedError` for a request that a scheduler with this configuration
        would reject. A server calls it, too, before it sends a request to the engine.
        """
        self.check_params(request.params)
        return self.check_tokens(request, output)

    def check_params(self, params: SamplingParams) -> None:
        """Raise `FieldError` for invalid sampling parameters. This check is slow for many token
        ids, so that callers do it once for all choices of an API request."""
        stop_ids = (*(() if params.ignore_eos else self.eos_ids), *params.stop_token_ids)
        params.require_vocabulary(self.vocab_size, stop_ids)

    def check_tokens(self, request: Request, output: tuple[int, ...] = ()) -> np.ndarray:
        """Check the tokens of a request, and return them as `check_request` does."""
        prompt, params = request.prompt, request.params
        if not prompt:
            raise FieldError("prompt", "is empty", "give at least one token")
        salt = request.cache_salt
        if salt is not None and not 0 < len(salt) <= MAX_SALT_CHARS:
            remedy = f"give 1 to {MAX_SALT_CHARS} characters, or leave it out"
            raise FieldError("cache_salt", f"has {len(salt)} characters", remedy)
        tokens = {"prompt": request.prompt_array()}
        if output:
            tokens["output"] = np.asarray(output)
        for field, ids in tokens.items():
            lowest, highest = int(np.minimum.reduce(ids)), int(np.maximum.reduce(ids))
            if not 0 <= lowest <= highest < self.vocab_size:
                remedy = f"use ids in [0, {self.vocab_size})"
                raise FieldError(field, "has a token id out of range", remedy)
        longest = self.max_sequence_tokens - 1
        if len(prompt) > longest:
            limit = "" if self.max_model_len <= longest + 1 else " (the whole KV pool)"
            raise too_long("prompt", len(prompt), longest + 1, limit)
        if len(output) >= min(params.max_tokens, longest + 1 - len(prompt)):
            raise FieldError("output", f"{len(output)} tokens fill the context", "end it instead")
        token_ids = np.concatenate([*tokens.values()]) if output else tokens["prompt"]
        return token_ids.astype(np.int32, copy=False)
