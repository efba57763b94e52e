"""The bodies of `/v1/completions`: what is asked, and what is answered."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from cbatch.core.errors import FieldError
from cbatch.core.request import SamplingParams
from cbatch.notyet import without_neutral_fields
from cbatch.params import SAMPLING_FIELDS, sampling_from_json
from cbatch.server.logprobs import CompletionLogprobs

DEFAULTS = SamplingParams()
MAX_CHOICES = 128  # sequences that one call may start


class CompletionCall(msgspec.Struct, frozen=True):
    """A call that has been checked. `ignored` are the fields that nobody here knows."""

    prompts: tuple[str | tuple[int, ...], ...]
    params: SamplingParams
    model: str | None
    stream: bool
    include_usage: bool
    echo: bool
    priority: int
    ignored: tuple[str, ...]


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ResponseChoice(msgspec.Struct):
    """`seed` is the one asked for, or the one that was drawn."""

    index: int
    text: str
    seed: int
    finish_reason: str | None = None
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None

    def extend(self, part: ResponseChoice) -> None:
        """Add what came after it."""
        self.text += part.text
        self.finish_reason = part.finish_reason
        if self.logprobs is not None and part.logprobs is not None:
            self.logprobs += part.logprobs


class Response(msgspec.Struct, omit_defaults=False):
    """A whole completion, or one chunk of a stream."""

    id: str
    created: int
    model: str
    choices: list[ResponseChoice]
    usage: Usage | None = None
    object: Literal["text_completion"] = "text_completion"


def parse_call(body: bytes) -> CompletionCall:
    """Raises `FieldError` naming the field at fault."""
    try:
        record = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FieldError("body", f"is not JSON ({error})", "send a JSON object") from error
    if not isinstance(record, dict):
        raise FieldError("body", "is not a JSON object", 'send {"prompt": ...}')
    given = {name: value for name, value in record.items() if value is not None}
    rest = without_neutral_fields(given)
    model = _take(rest, "model", str, None)
    prompts = _prompts(rest.pop("prompt", None))
    stream = _take(rest, "stream", bool, False)
    stream_options = _take(rest, "stream_options", dict[str, Any], {})
    priority = _take(rest, "priority", int, 0)
    rest.pop("user", None)
    sampling = {name: rest.pop(name) for name in SAMPLING_FIELDS if name in rest}
    params = sampling_from_json(sampling, DEFAULTS)
    echo = _take(rest, "echo", bool, False)
    if echo and params.logprobs is not None:
        params = msgspec.structs.replace(params, prompt_logprobs=params.logprobs)
        if params.n > 1:
            raise FieldError("n", f"{params.n} choices with `echo` and `logprobs`", "ask for 1")
    if params.n * len(prompts) > MAX_CHOICES:
        raise FieldError(
            "n", f"{params.n} choices of {len(prompts)} prompts", f"ask for <= {MAX_CHOICES} in all"
        )
    return CompletionCall(
        prompts=prompts,
        params=params,
        model=model,
        stream=stream,
        include_usage=_take(stream_options, "include_usage", bool, False),
        echo=echo,
        priority=priority,
        ignored=tuple(rest),
    )


def _take(record: dict[str, Any], field: str, kind: Any, default: Any) -> Any:
    value = record.pop(field, None)
    if value is None:
        return default
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise FieldError(field, f"{value!r} is not allowed", str(error)) from error


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """A text, its token ids, or a list of either."""
    if isinstance(value, str):
        return (value,)
    remedy = "send a text, a list of token ids, or a list of either"
    if not isinstance(value, list) or not value:
        raise FieldError("prompt", "is missing" if value is None else "is empty", remedy)
    if all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        return (tuple(value),)
    if all(isinstance(p, str | list) for p in value):
        return tuple(_prompts(p)[0] for p in value)
    raise FieldError("prompt", "mixes texts and token ids", remedy)
