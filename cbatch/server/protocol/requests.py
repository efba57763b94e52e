"""API requests: the fields of their bodies, and their conversion to requests for the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, islice
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from cbatch.core.request.errors import FieldError, too_long
from cbatch.core.request.from_json import SAMPLING_FIELDS, STRUCTURED_FIELDS, sampling_from_json
from cbatch.core.request.request import (
    MAX_TOP_LOGPROBS,
    CacheSalt,
    SamplingParams,
    StructuredOutputs,
    require_no_more_ids,
)
from cbatch.core.request.typed import converted
from cbatch.engine.unsupported import without_neutral_fields
from cbatch.server.protocol.body import MAX_IGNORED, decode_object, take_fields, unknown_members
from cbatch.server.protocol.model import ServedModel
from cbatch.text.forced_tools import ForcedCall, ToolChoice, Tools, forced_call
from cbatch.text.messages import conversation, list_problem, template_variables
from cbatch.text.output_processor import Prompt
from cbatch.text.reply_reader import ReplyFormat
from cbatch.text.thought_grammar import FreeCalls
from cbatch.text.tool_parsers import call_format, mark_ids

MAX_CHOICES = 128  # sequences that one request may start
MAX_STOPS = 32
MAX_STOP_CHARS = 256  # a matcher stores every prefix of a stop string
MAX_TIMEOUT_S = 1e6
ID_LISTS = ("stop_token_ids", "logit_bias", "allowed_token_ids", "banned_token_ids")

Int32 = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Count = Annotated[int, Meta(ge=1, lt=2**31)]
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
        """Run the task in this process."""
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
        """Return the constraint on the output, None for any text. Raises `FieldError`."""
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
    prompt: Any = None
    echo: bool = False
    add_special_tokens: bool = True


class ChatFields(RequestFields, frozen=True, kw_only=True):
    messages: Any = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    add_special_tokens: bool = False
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None  # a variable of the chat template, as in vLLM
    tools: Tools = []
    tool_choice: ToolChoice | None = None  # None means "auto"
    parallel_tool_calls: bool = True
    include_reasoning: bool = True  # as in vLLM: false drops thoughts
    separate_reasoning: bool = True  # as in SGLang: false leaves thoughts in the text


class TokenizeFields(msgspec.Struct, frozen=True, kw_only=True):
    """A text to tokenize, or a conversation with the fields of a chat that change its prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool | None = None  # None: true for a text, else false
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: Tools = []
    tool_choice: ToolChoice | None = None
    truncate_prompt_tokens: Count | None = None
    return_token_strs: bool = False


class ApiRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request of either API. `ignored` are the names of unknown fields. The HTTP handler
    sets `id`, `timeout_s`, `arrived_s`, `itl_target_s`, `owner` and `key_salt`."""

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


def parse_completion(body: bytes, model: ServedModel) -> ApiRequest:
    """Return the checked request. Raises `FieldError` naming the field."""
    fields, sampling, unknown = _parse(body, CompletionFields, model)
    prompt_only = (
        fields.echo and type(sampling.get("max_tokens")) is int and not sampling["max_tokens"]
    )
    if prompt_only:
        sampling["max_tokens"] = 1  # the engine's minimum
    params, grammar_field = _structured(sampling, fields, None)
    if fields.echo and params.logprobs is not None:
        params = msgspec.structs.replace(params, prompt_logprobs=params.logprobs)
        if params.n > 1:
            raise FieldError("n", f"{params.n} choices with `echo` and `logprobs`", "ask for 1")
    token_or_texts = token_prompts(fields.prompt, model)
    prompts = tuple(_read_prompt(prompt, fields, model) for prompt in token_or_texts)
    _check_size(params, len(prompts))
    return ApiRequest(
        prompts=prompts,
        params=params,
        fields=msgspec.structs.replace(fields, prompt=None),
        ignored=unknown,
        echo=fields.echo,
        prompt_only=prompt_only,
        grammar_field=grammar_field,
    )


def parse_chat(body: bytes, model: ServedModel) -> ApiRequest:
    """Return the checked request. Raises `FieldError` naming the field."""
    fields, sampling, ignored = _parse(body, ChatFields, model)
    if fields.top_logprobs and not fields.logprobs:
        raise FieldError("top_logprobs", "without `logprobs`", "ask for `logprobs` as well")
    if fields.logprobs:
        sampling["logprobs"] = fields.top_logprobs
    sampling.setdefault("max_tokens", model.default_max_tokens)
    tools, choice, parallel = list(fields.tools), fields.tool_choice, fields.parallel_tool_calls
    forced = forced_call(tools, choice, parallel=parallel)
    calls = call_format(model.tool_parser, tools, choice)
    separate = fields.separate_reasoning and model.thoughts is not None
    thoughts = model.thoughts or (calls and calls.thoughts)
    names = frozenset(tool.function.name for tool in tools)
    reply = ReplyFormat(calls, thoughts, forced, separate, parallel, names)
    params, grammar_field = _structured(sampling, fields, forced)
    constrain, output = model.constrain, params.structured_outputs
    if calls is not None and output is not None and output.around is None:
        constrain = partial(model.constrain, calls=FreeCalls(calls, tools, parallel))
        params = constrain(params, ())  # checks the tools; the prompt's end is not known yet
    elif calls is not None:  # unforced calls follow no grammar
        strict = (at for at, tool in enumerate(tools) if tool.function.strict)
        ignored = (*ignored, *(f"tools[{at}].function.strict" for at in strict))
    _check_size(params, 1)
    ids = partial(chat_ids, body)
    return ApiRequest(
        prompts=(PendingPrompt(len(body), model, ids, "messages", constrain),),
        params=params,
        fields=msgspec.structs.replace(fields, messages=None, tools=[]),
        ignored=ignored,
        grammar_field=grammar_field,
        reply=None if reply.is_text else reply,
        mark_ids=None if reply.is_text else mark_ids(reply, model.tokenizer),
        include_reasoning=fields.include_reasoning,
    )


def _structured(
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


def _parse(
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


def _check_size(params: SamplingParams, num_prompts: int) -> None:
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
    """Convert a text, token ids, or a list of either to prompts. Raises `FieldError`."""
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


def _read_prompt(
    prompt: str | tuple[int, ...], fields: CompletionFields, model: ServedModel
) -> AnyPrompt:
    """Return the prompt for the engine. A text stays a text if no option changes its token ids."""
    num_last, special = fields.truncate_prompt_tokens, fields.add_special_tokens
    if not isinstance(prompt, str):
        return _truncated(prompt, num_last)
    model.require_length("prompt", prompt)
    if num_last is None and special:
        return prompt
    ids = partial(text_ids, prompt, add_special_tokens=special, num_last=num_last)
    return PendingPrompt(len(prompt.encode()), model, ids)


def text_ids(
    text: str, model: ServedModel, *, add_special_tokens: bool = True, num_last: int | None = None
) -> tuple[int, ...]:
    """Return the ids of the prompt's last `num_last` tokens; None: all."""
    ids = model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return _truncated(tuple(ids), num_last)


def chat_ids(body: bytes, model: ServedModel) -> tuple[int, ...]:
    """Return the token ids of a chat's messages. Raises `FieldError`."""
    fields = take_fields(decode_object(body), ChatFields)
    text = chat_text(fields, model)
    ids = model.encode("messages", text, add_special_tokens=fields.add_special_tokens)
    return _truncated(ids, fields.truncate_prompt_tokens)


def chat_text(fields: ChatFields | TokenizeFields, model: ServedModel) -> str:
    """Return the prompt of a chat's messages as text. Raises `FieldError`."""
    tools = fields.tools if fields.tool_choice != "none" else []
    effort = (
        {} if fields.reasoning_effort is None else {"reasoning_effort": fields.reasoning_effort}
    )
    return model.render(
        conversation(fields.messages),
        tools=msgspec.to_builtins(tools) or None,
        add_generation_prompt=fields.add_generation_prompt,
        variables=template_variables(effort | (fields.chat_template_kwargs or {})),
    )


def _truncated(ids: tuple[int, ...], num_last: int | None) -> tuple[int, ...]:
    return ids if num_last is None else ids[-num_last:]
