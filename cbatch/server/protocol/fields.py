"""API requests: the fields of their bodies, and their conversion to requests for the engine."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import chain, islice
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from cbatch.core.request.errors import FieldError, too_long
from cbatch.core.request.from_json import SAMPLING_FIELDS, STRUCTURED_FIELDS, sampling_from_json
from cbatch.core.request.request import (
    DRAFTERS,
    CacheSalt,
    SamplingParams,
    StructuredOutputs,
    require_no_more_ids,
)
from cbatch.core.request.typed import converted, require_text
from cbatch.engine.unsupported import without_neutral_fields
from cbatch.server.protocol.model import ServedModel
from cbatch.text.forced_tools import ForcedCall
from cbatch.text.messages import list_problem
from cbatch.text.output_processor import Prompt
from cbatch.text.reply_formats import ReplyFormat

MAX_CHOICES = 128  # sequences that one request may start
MAX_STOPS = 32
MAX_STOP_CHARS = 256  # a matcher stores every prefix of a stop string
MAX_TIMEOUT_S = 1e6
# Limit of lists and objects in a body: millions would hold the interpreter lock for a second.
MAX_CONTAINERS = 250_000
MAX_MEMBERS = 10_000  # of a body, not counting those of its members
MAX_IGNORED = 64  # names of unknown members to report, of which a body may have many
ID_LISTS = ("stop_token_ids", "logit_bias", "allowed_token_ids", "banned_token_ids")

_ID = {"type": "integer", "minimum": 0}
_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": _ID, "minItems": 1}
_PROMPTS = {"type": "array", "items": {"oneOf": [_TEXT, _IDS]}, "minItems": 1}
_STOP = _TEXT | {"maxLength": MAX_STOP_CHARS}
# Limits of sampling parameters that neither their types nor `RANGES` tell, as JSON schemas.
LIMITS: dict[str, dict[str, Any]] = {
    "n": {"maximum": MAX_CHOICES},
    "stop": {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]},
    "logit_bias": {"propertyNames": {"pattern": "^[0-9]{1,9}$"}},
    "allowed_token_ids": _IDS,
    **dict.fromkeys(("stop_token_ids", "banned_token_ids"), {"items": _ID}),
    "drafter": {"items": {"enum": list(DRAFTERS)}, "minItems": 1, "uniqueItems": True},
}

Int32 = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Count = Annotated[int, Meta(ge=1, lt=2**31)]
AnyStruct = TypeVar("AnyStruct", bound=msgspec.Struct)
Fields = TypeVar("Fields", bound="RequestFields")


class PendingPrompt(msgspec.Struct):
    """A prompt that is tokenized only after its place in the queue is reserved. `num_bytes` is its
    size, and a rough upper bound of its tokens. `task` runs in a worker and returns the token ids;
    `field` is the field that errors name. `constrain` adds the grammar of the text around a
    structured output to the parameters, by the ids."""

    num_bytes: int
    model: ServedModel
    task: Callable[[ServedModel], tuple[int, ...]]
    field: str = "prompt"
    constrain: Callable[[SamplingParams, Sequence[int]], SamplingParams] | None = None

    def make(self) -> tuple[int, ...]:
        return self.task(self.model)

    def drop(self) -> None:
        """Drop the task, which holds the whole body."""
        self.num_bytes = 0
        del self.task


AnyPrompt = Prompt | PendingPrompt


def max_prompt_tokens(prompt: AnyPrompt) -> int:
    """Return an upper bound of the prompt's tokens, to reserve until they are counted."""
    if isinstance(prompt, PendingPrompt):
        return prompt.num_bytes
    return len(prompt.encode()) if isinstance(prompt, str) else len(prompt)


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True):
    """A JSON schema, which the output always follows, `strict` or not."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """The output format. Its schema is in `json_schema`, or in `schema` as in llama.cpp."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None

    def output(self) -> StructuredOutputs | None:
        inner = None if self.json_schema is None else self.json_schema.schema
        schemas = [schema for schema in (inner, self.schema) if schema is not None]
        fewest, limit = {"text": (0, 0), "json_object": (0, 1), "json_schema": (1, 1)}[self.type]
        if not fewest <= len(schemas) <= limit:
            problem = f"{self.type!r} with {len(schemas)} schemas"
            remedy = "leave them out" if limit == 0 else "give one, in `json_schema`"
            raise FieldError("response_format", problem, remedy)
        if self.type == "text":
            return None
        if schemas:
            return StructuredOutputs(json=schemas[0])
        return StructuredOutputs(json_object=True)


class RequestFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of every request, except sampling parameters. Null counts as absent."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    priority: Int32 = 0
    cache_salt: CacheSalt | None = None
    response_format: ResponseFormat = ResponseFormat("text")
    user: str | None = None
    timeout: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)] | None = None  # seconds, in total
    truncate_prompt_tokens: Count | None = None  # number of last tokens to keep
    return_token_ids: bool = False
    return_metrics: bool = False  # times and speculation, in the last chunk or the response


class CompletionFields(RequestFields, frozen=True, kw_only=True):
    prompt: Annotated[Any, Meta(extra_json_schema={"oneOf": [_TEXT, _PROMPTS, _IDS]})] = None
    echo: bool = False
    add_special_tokens: bool = True


class ApiRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request of any API. `ignored` are the names of unknown fields."""

    prompts: tuple[AnyPrompt, ...]
    params: SamplingParams
    fields: RequestFields = RequestFields()
    ignored: tuple[str, ...] = ()
    id: str = ""  # the id of the response, which is the only id that a client sees
    timeout_s: float | None = None  # for the whole request, in addition to the server's limit
    arrived_s: float | None = None  # by `time.monotonic`; None: when it is submitted
    itl_target_s: float | None = None  # target for the longest gap between tokens
    owner: str | None = None  # one of several API keys, which share what is scarce
    key_salt: str | None = None  # of the API key, for the prefix cache
    echo: bool = False
    prompt_only: bool = False  # `max_tokens` is 0: the one generated token is not shown
    grammar_field: str = "structured_outputs"  # the field that asked for structured output
    reply: ReplyFormat | None = None  # None: a reply is only text
    mark_ids: frozenset[int] | None = None  # special tokens in the marks of `reply`
    include_reasoning: bool = True
    origin: msgspec.Struct | None = None  # what the builder of another API's response needs
    origin_bytes: int = 0  # what `origin` and its events hold

    def __post_init__(self) -> None:
        limits_s = [each for each in (self.timeout_s, self.fields.timeout) if each is not None]
        msgspec.structs.force_setattr(self, "timeout_s", min(limits_s, default=None))

    @property
    def num_bytes(self) -> int:
        """Approximate bytes that the request holds now."""
        return self.origin_bytes + sum(map(max_prompt_tokens, self.prompts))

    @property
    def cache_salt(self) -> str | None:
        """The salt of the request, that of its key, or one made of both."""
        own, of_key = self.fields.cache_salt, self.key_salt
        if own is None or of_key is None:
            return own or of_key
        return hashlib.sha256(f"{of_key} {own}".encode()).hexdigest()

    @property
    def include_usage(self) -> bool:
        """True if the stream ends with an extra chunk of usage or metrics."""
        return bool(self.fields.stream_options.include_usage) or self.fields.return_metrics


def structured(
    sampling: dict[str, Any], fields: RequestFields, forced: ForcedCall | None
) -> tuple[SamplingParams, str]:
    """Return the parameters with the request's constraint on the output, and its field. A format
    of the answer does not constrain a forced call."""
    params = sampling_from_json(sampling)
    constraints: dict[str, StructuredOutputs] = {}
    if forced is not None:
        constraints["tools"] = forced.output
    output = fields.response_format.output()
    if output is not None and forced is None:
        constraints["response_format"] = output
    if params.structured_outputs is not None:
        names = (name for name in STRUCTURED_FIELDS if sampling.get(name) is not None)
        constraints[next(names, "structured_outputs")] = params.structured_outputs
    if len(constraints) > 1:
        first, second = list(constraints)[:2]
        raise FieldError(second, f"and `{first}` exclude each other", "leave one out")
    for field, output in constraints.items():
        return msgspec.structs.replace(params, structured_outputs=output), field
    return params, "structured_outputs"


def parse(
    body: bytes, kind: type[Fields], model: ServedModel
) -> tuple[Fields, dict[str, Any], tuple[str, ...]]:
    """Return the fields of `kind`, the sampling parameters, and the names of unknown fields. The
    model's defaults apply, except `max_tokens`: a completion's default is 16, as in vLLM."""
    record = without_neutral_fields(decode_object(body))
    rest = dict(record)
    fields = take_fields(rest, kind)
    model.require(fields.model)
    names = (*SAMPLING_FIELDS, *STRUCTURED_FIELDS)
    sampling = {name: rest.pop(name) for name in names if name in rest}
    max_tokens = rest.pop("max_completion_tokens", None)  # the newer name of `max_tokens`
    if max_tokens is not None:
        sampling["max_tokens"] = converted("max_completion_tokens", max_tokens, Count)
    for name, value in sampling.items():
        if name in ID_LISTS and isinstance(value, list | dict):  # before the ids are read
            require_no_more_ids(name, len(value), model.vocab_size)
    _check_stops(sampling.get("stop"))
    defaults = dict(model.sampling_defaults)
    defaults.pop("max_tokens", None)
    known = {name: value for name, value in record.items() if name in fields.__struct_fields__}
    ignored = islice(chain(rest, unknown_members(known, fields, "")), MAX_IGNORED)
    return fields, defaults | sampling, tuple(ignored)


def check_size(params: SamplingParams, num_prompts: int) -> None:
    if params.n * num_prompts > MAX_CHOICES:
        problem = f"{params.n} choices of {num_prompts} prompts"
        raise FieldError("n", problem, f"ask for <= {MAX_CHOICES} in all")


def _check_stops(stop: Any) -> None:
    stops = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    longest = max((len(text) for text in stops if isinstance(text, str)), default=0)
    if len(stops) > MAX_STOPS or longest > MAX_STOP_CHARS:
        remedy = f"give <= {MAX_STOPS} strings of <= {MAX_STOP_CHARS} characters"
        raise FieldError("stop", f"{len(stops)} strings, up to {longest} characters", remedy)


def token_prompts(value: Any, model: ServedModel) -> tuple[str | tuple[int, ...], ...]:
    remedy = "send a text, a list of token ids, or a list of either"
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise FieldError("prompt", list_problem(value), remedy)
    if type(value[0]) is int:
        if len(value) > model.max_model_len:
            raise too_long("prompt", len(value), model.max_model_len)
        if all(type(i) is int for i in value):
            return (tuple(value),)
    elif all(isinstance(p, str | list) for p in value):
        if len(value) > MAX_CHOICES:
            raise FieldError("prompt", f"{len(value)} prompts", f"send <= {MAX_CHOICES} at once")
        if all(isinstance(p, str) or (p and type(p[0]) is int) for p in value):
            return tuple(token_prompts(p, model)[0] for p in value)
    raise FieldError("prompt", "mixes texts, token ids or other values", remedy)


def read_prompt(
    prompt: str | tuple[int, ...], fields: CompletionFields, model: ServedModel
) -> AnyPrompt:
    """Return the prompt for the engine. A text stays a text if no option changes its token ids."""
    num_last, special = fields.truncate_prompt_tokens, fields.add_special_tokens
    if not isinstance(prompt, str):
        return truncated(prompt, num_last)
    model.require_length("prompt", prompt)
    if num_last is None and special:
        return prompt
    ids = partial(text_ids, prompt, add_special_tokens=special, num_last=num_last)
    return PendingPrompt(len(prompt.encode()), model, ids)


def text_ids(
    text: str, model: ServedModel, *, add_special_tokens: bool = True, num_last: int | None = None
) -> tuple[int, ...]:
    ids = model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return truncated(tuple(ids), num_last)


def truncated(ids: tuple[int, ...], num_last: int | None) -> tuple[int, ...]:
    return ids if num_last is None else ids[-num_last:]


# ---- JSON bodies, each field checked separately, so that an error names it -------------------


def decode_object(body: bytes, limit: int = MAX_CONTAINERS) -> dict[str, Any]:
    """Return the body's JSON object without null members. Raises `FieldError`, also for more than
    `limit` lists and objects, where brackets in strings count as well."""
    if body.count(b"[") + body.count(b"{") > limit:
        remedy = f"send <= {limit} of them"
        raise FieldError("body", "has too many lists and objects", remedy)
    try:
        record = msgspec.json.decode(body.removeprefix(codecs.BOM_UTF8))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        with suppress(RecursionError):
            require_text("", _lenient(body))
        raise FieldError("body", f"is not JSON ({error})", "send a JSON object") from error
    except RecursionError as error:
        raise FieldError("body", "is nested too deeply", "send a plain JSON object") from error
    if not isinstance(record, dict):
        raise FieldError("body", "is not a JSON object", 'send {"prompt": ...}')
    if len(record) > MAX_MEMBERS:
        raise FieldError("body", f"has {len(record)} members", f"send <= {MAX_MEMBERS} of them")
    return {name: value for name, value in record.items() if value is not None}


def _lenient(body: bytes) -> Any:
    """Decode JSON that may contain lone surrogates, which msgspec rejects; None if invalid."""
    with suppress(ValueError):
        return json.loads(body)


def take_fields(record: dict[str, Any], kind: type[AnyStruct]) -> AnyStruct:
    values = {}
    for field in _fields_of(kind):
        if field.name in record:
            values[field.name] = converted(field.name, record.pop(field.name), field.type)
        elif field.required:
            raise FieldError(field.name, "is missing", "give it")
    return kind(**values)


@lru_cache
def _fields_of(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Return the fields of `kind`. Cached, as this takes longer than checking a request."""
    return msgspec.structs.fields(kind)


def unknown_members(raw: Any, read: Any, prefix: str) -> Iterator[str]:
    """Yield paths of unknown members of `raw`, such as `tools[0].function.color`. `read` is the
    struct or list that was parsed from `raw`."""
    if isinstance(raw, dict) and isinstance(read, msgspec.Struct):
        for name, value in raw.items():
            if name in read.__struct_fields__:
                yield from unknown_members(value, getattr(read, name), f"{prefix}{name}.")
            elif value is not None:
                yield f"{prefix}{name}"
    elif isinstance(raw, list) and isinstance(read, list):
        for at, item in enumerate(raw):
            yield from unknown_members(item, read[at], f"{prefix[:-1]}[{at}].")
