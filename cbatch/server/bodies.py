"""What clients ask for: bodies of calls, each field checked by itself so that an error names it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from cbatch.core.errors import FieldError
from cbatch.core.request import MAX_TOP_LOGPROBS, SamplingParams, StructuredOutputs
from cbatch.notyet import without_neutral_fields
from cbatch.params import SAMPLING_FIELDS, sampling_from_json
from cbatch.server.model import ServedModel
from cbatch.server.prompts import PendingPrompt
from cbatch.server.tools import CallReader, ForcedCall, ToolChoice, Tools, forced_call
from cbatch.server.tools_auto import MakeReader, free_calls
from cbatch.text.chat import RESERVED

DEFAULTS = SamplingParams()
MAX_CHOICES = 128  # sequences that one call may start
MAX_STOPS = 32
MAX_STOP_CHARS = 256  # a matcher keeps every beginning of a stop string
MAX_TIMEOUT_S = 1e6
ROLES = ("system", "developer", "user", "assistant", "tool", "function")

Int32 = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Count = Annotated[int, Meta(ge=1, lt=2**31)]
Fields = TypeVar("Fields", bound="CallFields")
ReadPrompt = str | tuple[int, ...] | PendingPrompt


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True):
    """Followed to the letter, `strict` or not."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class CallFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of every call that are no sampling parameters. Null is as good as absent."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    priority: Int32 = 0
    response_format: ResponseFormat = ResponseFormat("text")
    user: str | None = None
    timeout: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)] | None = None  # seconds, in all
    truncate_prompt_tokens: Count | None = None  # the last so many of the prompt
    return_token_ids: bool = False
    return_metrics: bool = False  # times and speculation, with the last chunk or the whole answer


class CompletionFields(CallFields, frozen=True, kw_only=True):
    prompt: Any = None
    echo: bool = False
    add_special_tokens: bool = True


class ChatFields(CallFields, frozen=True, kw_only=True):
    messages: Any = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    add_special_tokens: bool = False
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools = []
    tool_choice: ToolChoice | None = None  # "auto"
    parallel_tool_calls: bool = True


class TokenizeFields(msgspec.Struct, frozen=True, kw_only=True):
    """A text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool | None = None  # None: for a text
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeFields(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A call that has been checked. `ignored` are the fields that nobody here knows."""

    prompts: tuple[ReadPrompt, ...]
    params: SamplingParams
    fields: CallFields
    ignored: tuple[str, ...]
    echo: bool = False
    grammar_field: str = "structured_outputs"  # what the client asked for them by
    call_reader: MakeReader | None = None  # for a choice's text; None: no call is looked for in it

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk of its own for what belongs to no choice."""
        return bool(self.fields.stream_options.include_usage) or self.fields.return_metrics


def decode_object(body: bytes) -> dict[str, Any]:
    """A JSON object without its nulls. Raises `FieldError`."""
    try:
        record = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FieldError("body", f"is not JSON ({error})", "send a JSON object") from error
    except RecursionError as error:
        raise FieldError("body", "is nested too deeply", "send a plain JSON object") from error
    if not isinstance(record, dict):
        raise FieldError("body", "is not a JSON object", 'send {"prompt": ...}')
    return {name: value for name, value in record.items() if value is not None}


def parse_completion(body: bytes, model: ServedModel) -> Call:
    """Raises `FieldError` naming the field at fault."""
    fields, sampling, rest = _parse(body, CompletionFields, model)
    params, grammar_field = _structured(sampling_from_json(sampling, DEFAULTS), fields, None)
    if fields.echo and params.logprobs is not None:
        params = msgspec.structs.replace(params, prompt_logprobs=params.logprobs)
        if params.n > 1:
            raise FieldError("n", f"{params.n} choices with `echo` and `logprobs`", "ask for 1")
    given = token_prompts(fields.prompt, model)
    prompts = tuple(_read_prompt(prompt, fields, model) for prompt in given)
    _check_size(params, len(prompts))
    return Call(
        prompts=prompts,
        params=params,
        fields=fields,
        ignored=rest,
        echo=fields.echo,
        grammar_field=grammar_field,
    )


def parse_chat(body: bytes, model: ServedModel) -> Call:
    """Raises `FieldError` naming the field at fault."""
    fields, sampling, rest = _parse(body, ChatFields, model)
    if fields.top_logprobs and not fields.logprobs:
        raise FieldError("top_logprobs", "without `logprobs`", "ask for `logprobs` as well")
    if fields.logprobs:
        sampling["logprobs"] = fields.top_logprobs
    sampling.setdefault("max_tokens", model.max_model_tokens)  # a reply ends when it ends
    tools, choice, parallel = list(fields.tools), fields.tool_choice, fields.parallel_tool_calls
    forced = forced_call(tools, choice, parallel=parallel)
    reader = free_calls(tools, choice, model.tool_parser, parallel=parallel)
    reader = reader if forced is None else partial(CallReader, forced.name)
    params, grammar_field = _structured(sampling_from_json(sampling, DEFAULTS), fields, forced)
    messages = conversation(fields.messages)
    variables = template_variables(fields.chat_template_kwargs)
    _check_size(params, 1)

    def make() -> tuple[int, ...]:
        text = model.render(
            messages,
            tools=msgspec.to_builtins(tools) if reader else None,
            add_generation_prompt=fields.add_generation_prompt,
            variables=variables,
        )
        ids = model.encode("messages", text, add_special_tokens=fields.add_special_tokens)
        return _truncated(ids, fields)

    return Call(
        prompts=(PendingPrompt(len(body), make),),
        params=params,
        fields=fields,
        ignored=rest,
        grammar_field=grammar_field,
        call_reader=reader,
    )


def _structured(
    params: SamplingParams, fields: CallFields, forced: ForcedCall | None
) -> tuple[SamplingParams, str]:
    """The parameters with the one thing that says what the output must be, and its field."""
    asked: dict[str, StructuredOutputs] = {}
    if forced is not None:
        asked["tools"] = forced.output
    shape = fields.response_format
    if shape.type == "json_object":
        asked["response_format"] = StructuredOutputs(json_object=True)
    elif shape.type == "json_schema":
        if shape.json_schema is None:
            raise FieldError("response_format", "has no `json_schema`", "give one")
        asked["response_format"] = StructuredOutputs(json=shape.json_schema.schema)
    if params.structured_outputs is not None:
        asked["structured_outputs"] = params.structured_outputs
    if len(asked) > 1:
        first, second = list(asked)[:2]
        raise FieldError(second, f"and `{first}` exclude each other", "leave one out")
    for field, output in asked.items():
        return msgspec.structs.replace(params, structured_outputs=output), field
    return params, "structured_outputs"


def _parse(
    body: bytes, kind: type[Fields], model: ServedModel
) -> tuple[Fields, dict[str, Any], tuple[str, ...]]:
    """The fields of `kind`, the sampling parameters, and the names of those that are neither."""
    rest = without_neutral_fields(decode_object(body))
    fields = take_fields(rest, kind)
    model.require(fields.model)
    sampling = {name: rest.pop(name) for name in SAMPLING_FIELDS if name in rest}
    longest = rest.pop("max_completion_tokens", None)  # the newer name of `max_tokens`
    if longest is not None:
        sampling["max_tokens"] = _converted("max_completion_tokens", longest, Count)
    for name, value in sampling.items():
        if name != "seed" and type(value) is int and abs(value) >= 2**31:
            raise FieldError(name, f"{_short(value)} is not allowed", "use a smaller number")
    _check_stops(sampling.get("stop"))
    return fields, sampling, tuple(rest)


AnyStruct = TypeVar("AnyStruct", bound=msgspec.Struct)


def take_fields(record: dict[str, Any], kind: type[AnyStruct]) -> AnyStruct:
    """Removes from `record` what `kind` declares, and checks it. Raises `FieldError`."""
    given = {}
    for field in _fields_of(kind):
        if field.name in record:
            given[field.name] = _converted(field.name, record.pop(field.name), field.type)
        elif field.required:
            raise FieldError(field.name, "is missing", "give it")
    return kind(**given)


@lru_cache
def _fields_of(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """To find them out takes longer than to check a call."""
    return msgspec.structs.fields(kind)


def _converted(name: str, value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise FieldError(name, f"{_short(value)} is not allowed", str(error)) from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_size(params: SamplingParams, num_prompts: int) -> None:
    if params.n * num_prompts > MAX_CHOICES:
        raise FieldError(
            "n", f"{params.n} choices of {num_prompts} prompts", f"ask for <= {MAX_CHOICES} in all"
        )


def _check_stops(stop: Any) -> None:
    given = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    longest = max((len(each) for each in given if isinstance(each, str)), default=0)
    if len(given) > MAX_STOPS or longest > MAX_STOP_CHARS:
        remedy = f"give <= {MAX_STOPS} strings of <= {MAX_STOP_CHARS} characters"
        raise FieldError("stop", f"{len(given)} strings, up to {longest} characters", remedy)


# ---- prompts ----------------------------------------------------------------------------------


def token_prompts(value: Any, model: ServedModel) -> tuple[str | tuple[int, ...], ...]:
    """A text, its token ids, or a list of either."""
    remedy = "send a text, a list of token ids, or a list of either"
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise FieldError("prompt", "is missing" if value is None else "is empty", remedy)
    if type(value[0]) is int:
        if len(value) > model.max_model_tokens:
            limit = f"the context takes {model.max_model_tokens}"
            raise FieldError("prompt", f"{len(value)} tokens do not fit", limit)
        if all(type(i) is int for i in value):
            return (tuple(value),)
    elif all(isinstance(p, str | list) for p in value):
        if len(value) > MAX_CHOICES:
            raise FieldError("prompt", f"{len(value)} prompts", f"send <= {MAX_CHOICES} at once")
        if all(isinstance(p, str) or (p and type(p[0]) is int) for p in value):
            return tuple(token_prompts(p, model)[0] for p in value)
    raise FieldError("prompt", "mixes texts, token ids or other things", remedy)


def _read_prompt(
    prompt: str | tuple[int, ...], fields: CompletionFields, model: ServedModel
) -> ReadPrompt:
    """The prompt as the engine shall have it: a text stays one where nothing is asked for."""
    if not isinstance(prompt, str):
        return _truncated(prompt, fields)
    model.require_length("prompt", prompt)
    if fields.truncate_prompt_tokens is None and fields.add_special_tokens:
        return prompt

    def make() -> tuple[int, ...]:
        ids = model.encode("prompt", prompt, add_special_tokens=fields.add_special_tokens)
        return _truncated(ids, fields)

    return PendingPrompt(len(prompt.encode()), make)


def _truncated(ids: tuple[int, ...], fields: CallFields) -> tuple[int, ...]:
    last = fields.truncate_prompt_tokens
    return ids if last is None else ids[-last:]


def conversation(value: Any) -> list[dict[str, Any]]:
    """Messages whose content is text: parts are joined by line breaks. Raises `FieldError`."""
    remedy = 'send [{"role": "user", "content": "..."}]'
    if not isinstance(value, list) or not value:
        raise FieldError("messages", "is missing" if value is None else "is empty", remedy)
    messages = []
    for at, message in enumerate(value):
        field = f"messages[{at}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise FieldError(field, "has no known role", f"use {', '.join(ROLES)}")
        content = message.get("content")
        if content is None and message["role"] != "assistant":
            raise FieldError(f"{field}.content", "is missing", "send a text")
        text = "" if content is None else _content(content, f"{field}.content")
        messages.append({**message, "content": text})
        if message.get("tool_calls"):
            calls = _earlier_calls(message["tool_calls"], f"{field}.tool_calls")
            messages[-1]["tool_calls"] = calls
    return messages


def _earlier_calls(value: Any, field: str) -> list[dict[str, Any]]:
    """As templates want them: the arguments are an object, where clients send its text."""
    try:
        calls = msgspec.convert(value, list[_EarlierCall])
        return [
            {**raw, "function": {**raw["function"], "arguments": call.function.decoded()}}
            for raw, call in zip(value, calls, strict=True)
        ]
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        remedy = 'send [{"id", "type": "function", "function": {"name", "arguments"}}]'
        raise FieldError(field, f"cannot be read ({error})", remedy) from error


class _EarlierFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any]

    def decoded(self) -> dict[str, Any]:
        if isinstance(self.arguments, dict):
            return self.arguments
        return msgspec.json.decode(self.arguments or "{}", type=dict[str, Any])


class _EarlierCall(msgspec.Struct):
    function: _EarlierFunction


def _content(value: Any, field: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise FieldError(field, "is no text", "send a text, or a list of text parts")
    texts = []
    for at, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            problem = f"{_short(kind)} is not supported yet"
            raise FieldError(f"{field}[{at}]", problem, "send parts of type 'text'")
        if not isinstance(part.get("text"), str):
            raise FieldError(f"{field}[{at}].text", "is no text", "send a text")
        texts.append(part["text"])
    return "\n".join(texts)


def template_variables(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Raises `FieldError` for a name that is the server's to give."""
    for name in given or {}:
        if name in RESERVED:
            raise FieldError(
                "chat_template_kwargs", f"{name!r} is not yours to set", "leave it out"
            )
    return given or {}
