"""Requests, their sampling parameters, and the ways in which a request can end."""

from __future__ import annotations

import enum
import json
import sys
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from cbatch.core.request.errors import FieldError, short
from cbatch.core.request.typed import convert_fields, knob, require_text

MAX_SEED = 2**64 - 1
MAX_TOP_LOGPROBS = 20
MAX_N = 16_384
MAX_INT32 = 2**31 - 1
MAX_SALT_CHARS = 256
CacheSalt = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_SALT_CHARS)]
MODEL = "model"  # the drafter that runs a draft model
LOOKUPS = ("ngram", "suffix")  # the drafters that look up repetitions in the text
DRAFTERS = (MODEL, *LOOKUPS)
DEFAULT_LOOKUP = "suffix"  # drafts in an engine whose options name no drafter
# Largest absolute bias: far beyond any logit, yet sums of biases do not overflow fp32.
MAX_LOGIT_BIAS = 1e30
# Values that mean None in other engines.
NONE_VALUES: dict[str, tuple[int, ...]] = {"top_k": (-1, 0), "seed": (-1,)}
_sampling = partial(knob, "sampling")
_MIN_FLOAT32, _MAX_FLOAT32 = (float(x) for x in (np.finfo("f").tiny, np.finfo("f").max))


class FinishReason(enum.StrEnum):
    """Reason why an accepted request ended. Each request has exactly one reason."""

    STOP = "stop"  # EOS, a stop token id, or a stop string in the detokenized text
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"  # by the client
    ERROR = "error"  # the request itself failed (non-finite logits, a faulting executor)


class StructuredOutputs(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """Constraint on the output, given as exactly one of these fields (named as in vLLM).

    `around` adds what may precede and follow the constrained text. EOS is allowed only where the
    output is complete. Raises `FieldError`; `cbatch.grammars` checks that the constraint compiles.
    """

    json: dict[str, Any] | str | None = None  # a JSON schema; stored as text
    json_object: bool | None = False  # any JSON object
    regex: str | None = None  # matched against the whole output
    choice: tuple[str, ...] | None = None  # one of these texts
    grammar: str | None = None  # Lark or GBNF
    around: str | None = None  # Lark grammar of the whole output; `@answer` is the constraint

    def __post_init__(self) -> None:
        constraints = self.__struct_fields__[:-1]
        given = [f for f in constraints if getattr(self, f) not in (None, False)]
        remedy = f"give one of {', '.join(constraints)}"
        _require(len(given) == 1, "structured_outputs", given, remedy)
        _require(self.choice != (), "structured_outputs", "choice: []", "give at least one text")
        # A schema is stored as text, because its integers may be too large for msgpack.
        if isinstance(self.json, dict):
            msgspec.structs.force_setattr(self, "json", _schema_text(self.json))
        for name in self.__struct_fields__:
            require_text(f"structured_outputs.{name}", getattr(self, name))


def _schema_text(schema: dict[str, Any]) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        problem = f"json: the schema is not JSON ({error})"
        raise FieldError("structured_outputs", problem, "give a JSON schema") from error


_UP_TO_20 = (0, MAX_TOP_LOGPROBS, f"use 0 to {MAX_TOP_LOGPROBS}, or leave it out")
# Minimum and maximum of fields of `SamplingParams`, and the remedy. The repetition penalty is
# limited so that its products with logits do not overflow fp32.
RANGES: dict[str, tuple[float, float, str]] = {
    "max_tokens": (1, MAX_INT32, f"ask for at least 1 and at most {MAX_INT32}"),
    "min_tokens": (0, MAX_INT32, "use 0 to max_tokens"),
    "temperature": (0, sys.float_info.max, "use 0 (greedy) or a finite positive number"),
    "top_k": (1, MAX_INT32, "use at least 1, or 0 to keep every token"),
    "top_p": (0, 1, "use a number in [0, 1]"),
    "min_p": (0, 1, "use a number in [0, 1]"),
    "seed": (0, MAX_SEED, "use 0 to 2**64 - 1, or leave it out"),
    "n": (1, MAX_N, f"ask for 1 to {MAX_N} choices"),
    "max_lookahead": (0, MAX_INT32, f"use 0 (no speculation) to {MAX_INT32}"),
    "repetition_penalty": (1e-3, 1e3, "use a number from 0.001 to 1000.0 (1: none)"),
    "presence_penalty": (-2, 2, "use a number in [-2, 2]"),
    "frequency_penalty": (-2, 2, "use a number in [-2, 2]"),
    "logprobs": _UP_TO_20,
    "prompt_logprobs": _UP_TO_20,
}


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sampling parameters of one request. Raises `FieldError` naming the field.

    Logits are processed in this order: `structured_outputs`, allowed and banned ids, stop ids,
    `logit_bias`, penalties, temperature, top_k, top_p, min_p. Stop ids are banned before
    `min_tokens`, unless a structured output allows nothing else. The repetition penalty looks at
    prompt and output, presence and frequency penalties at the output alone. `temperature` 0 is
    greedy, and so is `top_p` 0. Ties, also at the edge of a filter, go to the lowest id.

    Callers of the core expand `n` into requests with choice indices 0..n-1, and match `stop`
    (strings) on the text; the core itself uses token ids only.
    """

    max_tokens: Annotated[int, _sampling("maximum length of the output", "N")] = 16
    min_tokens: Annotated[int, _sampling("minimum length of the output", "N")] = 0
    temperature: Annotated[float, _sampling("0: greedy", "X")] = 1.0
    top_k: Annotated[int | None, _sampling("", "N")] = None
    top_p: Annotated[float, _sampling("", "X")] = 1.0
    min_p: Annotated[float, _sampling("", "X")] = 0.0
    seed: Annotated[int | None, _sampling("seed of sampling", default="random")] = None
    n: Annotated[int, _sampling("choices for each prompt", "N")] = 1
    stop: Annotated[tuple[str, ...], _sampling("stop string; repeatable", "TEXT")] = ()
    stop_token_ids: Annotated[tuple[int, ...], _sampling("end at this id; repeatable", "ID")] = ()
    include_stop_str_in_output: Annotated[
        bool, _sampling("keep the stop string or token in the text")
    ] = False
    skip_special_tokens: Annotated[bool, _sampling("leave special tokens out of the text")] = True
    spaces_between_special_tokens: Annotated[
        bool, _sampling("put spaces between special tokens")
    ] = True
    ignore_eos: Annotated[bool, _sampling("continue after an end token")] = False
    # Keskar et al. 2019, arXiv 1909.05858.
    repetition_penalty: Annotated[
        float, _sampling("above 1: tokens of prompt and output become less likely", "X")
    ] = 1.0
    presence_penalty: Annotated[
        float, _sampling("subtracted from the logit of each token in the output", "X")
    ] = 0.0
    frequency_penalty: Annotated[
        float, _sampling("subtracted once per occurrence in the output", "X")
    ] = 0.0
    logit_bias: Annotated[
        dict[int, float], _sampling("added to the logit of a token id; repeatable", "ID=BIAS")
    ] = {}
    allowed_token_ids: Annotated[
        tuple[int, ...] | None, _sampling("allow only these ids; repeatable", "ID")
    ] = None
    banned_token_ids: Annotated[tuple[int, ...], _sampling("ban this id; repeatable", "ID")] = ()
    structured_outputs: Annotated[
        StructuredOutputs | None,
        _sampling(
            """grammar of the output, such as '{"regex": "[a-z]+"}' or '{"json": {}}'""", "JSON"
        ),
    ] = None
    logprobs: Annotated[
        int | None, _sampling("log probabilities of each token and of the N most likely", "N")
    ] = None
    # raw: log softmax of the model's logits. processed: log probabilities under the distribution
    # that tokens are sampled from, for greedy tokens at temperature 1.
    logprobs_mode: Annotated[Literal["raw", "processed"], _sampling("")] = "raw"
    prompt_logprobs: Annotated[
        int | None, _sampling("the same for the prompt, always raw", "N")
    ] = None
    max_lookahead: Annotated[
        int | None, _sampling("maximum draft length k for these prompts", "N")
    ] = None
    drafter: tuple[str, ...] | None = None  # from `DRAFTERS`, preferred first; None: the engine's
    # rejection keeps the output distribution. coupled: the sampled tokens themselves do not depend
    # on the drafts. auto: coupled with a seed, else rejection.
    verification: Annotated[
        Literal["auto", "rejection", "coupled"],
        _sampling(
            "of drafts; coupled (auto, with a seed): sampled tokens do not depend on drafts; "
            "rejection (auto, without a seed): accepts more drafts"
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        convert_fields(self)
        for name, values in NONE_VALUES.items():
            if getattr(self, name) in values:
                msgspec.structs.force_setattr(self, name, None)
        if self.top_p == 0:  # the likeliest token alone
            msgspec.structs.force_setattr(self, "temperature", 0.0)
            msgspec.structs.force_setattr(self, "top_p", 1.0)
        for name, (minimum, maximum, remedy) in RANGES.items():
            value = getattr(self, name)
            _require(value is None or minimum <= value <= maximum, name, value, remedy)
        enough = self.min_tokens <= self.max_tokens
        _require(enough, "min_tokens", self.min_tokens, "use 0 to max_tokens")
        _require(all(self.stop), "stop", list(self.stop), "an empty string would stop at once")
        require_text("stop", self.stop)
        _require_ids("stop_token_ids", self.stop_token_ids)
        _require_ids("logit_bias", tuple(self.logit_bias))
        _require(
            all(abs(bias) <= MAX_LOGIT_BIAS for bias in self.logit_bias.values()),
            "logit_bias",
            self.logit_bias,
            f"use finite numbers, at most {MAX_LOGIT_BIAS} in size",
        )
        remedy = "allow at least one id, or leave it out"
        _require(self.allowed_token_ids != (), "allowed_token_ids", [], remedy)
        _require_ids("allowed_token_ids", self.allowed_token_ids or ())
        _require_ids("banned_token_ids", self.banned_token_ids)
        _require(
            self.drafter is None or is_chain(self.drafter),
            "drafter",
            self.drafter,
            f"name one or more of {', '.join(DRAFTERS)}, each once",
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def logits_divisor(self) -> float:
        """Return the temperature, 1 if greedy, clipped to the positive normal float32 range."""
        return 1.0 if self.greedy else min(max(self.temperature, _MIN_FLOAT32), _MAX_FLOAT32)

    @property
    def coupled(self) -> bool:
        """True if draft and target share their noise ("coupled", or "auto" with a seed)."""
        return self.verification == "coupled" or (
            self.verification == "auto" and self.seed is not None
        )

    def wants_prompt(self, choice: int) -> bool:
        """Return whether choice number `choice` reports the log probabilities of the prompt. Only
        choice 0 does, because the prompt is the same for all choices."""
        return self.prompt_logprobs is not None and choice == 0

    def require_vocabulary(self, vocab_size: int, stop_ids: tuple[int, ...]) -> None:
        """Raise `FieldError` if an id is beyond the vocabulary, or if no token remains to sample.
        `stop_ids`, EOS included, are banned until `min_tokens` tokens are output."""
        for field, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", tuple(self.logit_bias)),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("banned_token_ids", self.banned_token_ids),
        ):
            require_no_more_ids(field, len(ids), vocab_size)
            if ids and max(ids) >= vocab_size:
                raise FieldError(field, "has an id out of range", f"use ids in [0, {vocab_size})")
        banned = set(self.banned_token_ids).union(stop_ids if self.min_tokens else ())
        if self.allowed_token_ids is not None:
            num_allowed = len(set(self.allowed_token_ids) - banned)
        else:  # EOS ids may be beyond the vocabulary
            num_allowed = vocab_size - sum(i < vocab_size for i in banned)
        if not num_allowed:
            field = "banned_token_ids" if self.allowed_token_ids is None else "allowed_token_ids"
            raise FieldError(
                field, "no token is left to choose", "allow one that is neither banned nor a stop"
            )


def require_no_more_ids(field: str, count: int, vocab_size: int) -> None:
    """Raise `FieldError` if a field has more ids than the vocabulary."""
    if count > vocab_size:
        raise FieldError(
            field, f"has {count} ids", f"the vocabulary has {vocab_size}: give no more"
        )


def is_chain(names: tuple[str, ...]) -> bool:
    """Return whether `names` is a list of drafters: not empty, known names, no repeats."""
    return 0 < len(names) == len(set(names)) and set(names) <= set(DRAFTERS)


def _require(ok: bool, field: str, value: object, remedy: str) -> None:
    if not ok:
        raise FieldError(field, f"{short(value)} is not allowed", remedy)


def _require_ids(field: str, ids: tuple[int, ...]) -> None:
    lowest = min(ids, default=0)
    _require(lowest >= 0, field, lowest, "use token ids of the vocabulary")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to complete. `seed` is always set: the entry point draws a seed if the caller
    gave none, and keeps it for a restart of the engine. So the sampling noise is a function of
    (seed, choice, position) alone."""

    request_id: str
    prompt: tuple[int, ...]  # token ids
    params: SamplingParams
    seed: int
    choice: int = 0  # index among the n choices of one API request
    priority: int = 0  # under the `priority` queue policy, smaller is served first
    cache_salt: CacheSalt | None = None  # prefixes are shared only among requests of equal salt
    compile_s: float = 0.0  # processor time to compile its grammar, measured by the validator
    itl_target_s: float | None = None  # target gap between its tokens; None: the scheduler's
    owner: str | None = None  # owners share the number of compiled grammars

    def prompt_array(self) -> np.ndarray:
        """Return the prompt, [tokens] of any integer dtype: its ids may not fit int32 before they
        are validated."""
        return np.asarray(self.prompt)
