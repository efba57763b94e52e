"""Requests of completions and chats from their bodies; tokenizing and detokenizing of texts."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import MAX_TOP_LOGPROBS
from cbatch.server.protocol.fields import (
    ApiRequest,
    CompletionFields,
    Count,
    PendingPrompt,
    RequestFields,
    check_size,
    decode_object,
    parse,
    read_prompt,
    structured,
    take_fields,
    token_prompts,
    truncated,
)
from cbatch.server.protocol.model import ServedModel
from cbatch.server.protocol.responses import Detokenized, Tokenized
from cbatch.text.chat_format import FreeCalls
from cbatch.text.forced_tools import ToolChoice, Tools, forced_call
from cbatch.text.messages import ROLES, conversation, template_variables
from cbatch.text.reply_formats import ReplyFormat
from cbatch.text.tool_parsers import call_format, mark_ids
from cbatch.text.written_calls import text_parameters

# This many characters, or token ids, are allowed even if the model's context is shorter.
MIN_TEXT_LIMIT = 2**18
_PART = {"properties": {"type": {"const": "text"}, "text": {"type": "string"}}}
_PARTS = {"type": "array", "items": _PART | {"required": ["type", "text"]}}
_MEMBERS = {"role": {"enum": list(ROLES)}, "content": {"oneOf": [{"type": "string"}, _PARTS]}}
_MESSAGE = {"type": "object", "properties": _MEMBERS, "required": ["role", "content"]}
_MESSAGES = Meta(extra_json_schema={"type": "array", "items": _MESSAGE, "minItems": 1})


class ChatFields(RequestFields, frozen=True, kw_only=True):
    messages: Annotated[Any, _MESSAGES] = None
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
    messages: Annotated[Any, _MESSAGES] = None
    add_special_tokens: bool | None = None  # None: true for a text, else false
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: Tools = []
    tool_choice: ToolChoice | None = None
    truncate_prompt_tokens: Count | None = None
    return_token_strs: bool = False


class DetokenizeFields(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[int]  # at most the context length


def parse_completion(body: bytes, model: ServedModel, **call: Any) -> ApiRequest:
    fields, sampling, unknown = parse(body, CompletionFields, model)
    prompt_only = (
        fields.echo and type(sampling.get("max_tokens")) is int and not sampling["max_tokens"]
    )
    if prompt_only:
        sampling["max_tokens"] = 1  # the engine's minimum
    params, grammar_field = structured(sampling, fields, None)
    if fields.echo and params.logprobs is not None:
        params = msgspec.structs.replace(params, prompt_logprobs=params.logprobs)
        if params.n > 1:
            raise FieldError("n", f"{params.n} choices with `echo` and `logprobs`", "ask for 1")
    token_or_texts = token_prompts(fields.prompt, model)
    prompts = tuple(read_prompt(prompt, fields, model) for prompt in token_or_texts)
    check_size(params, len(prompts))
    return ApiRequest(
        prompts=prompts,
        params=params,
        fields=msgspec.structs.replace(fields, prompt=None),
        ignored=unknown,
        echo=fields.echo,
        prompt_only=prompt_only,
        grammar_field=grammar_field,
        **call,
    )


def parse_chat(body: bytes, model: ServedModel, **call: Any) -> ApiRequest:
    """Return the checked request. `call` has the fields of `ApiRequest` that are not in the body.
    Raises `FieldError` naming the field."""
    fields, sampling, ignored = parse(body, ChatFields, model)
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
    texts = text_parameters(tools)
    params, grammar_field = structured(sampling, fields, forced)
    constrain, output = model.constrain, params.structured_outputs
    if calls is not None and not calls.shapes and output is not None:
        calls = None  # a call would follow no grammar, so the model can only answer
    reply = ReplyFormat(calls, thoughts, forced, separate, parallel, names, texts)
    if calls is not None and calls.shapes and output is not None and output.around is None:
        constrain = partial(model.constrain, calls=FreeCalls(calls, tools, parallel))
        params = constrain(params, ())  # checks the tools; the prompt's end is not known yet
    elif calls is not None:  # unforced calls follow no grammar
        strict = (at for at, tool in enumerate(tools) if tool.function.strict)
        ignored = (*ignored, *(f"tools[{at}].function.strict" for at in strict))
    check_size(params, 1)
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
        **call,
    )


def chat_ids(body: bytes, model: ServedModel) -> tuple[int, ...]:
    fields = take_fields(decode_object(body), ChatFields)
    text = chat_text(fields, model)
    ids = model.encode("messages", text, add_special_tokens=fields.add_special_tokens)
    return truncated(ids, fields.truncate_prompt_tokens)


def chat_text(fields: ChatFields | TokenizeFields, model: ServedModel) -> str:
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


def tokenize(body: bytes, model: ServedModel) -> bytes:
    fields = take_fields(decode_object(body), TokenizeFields)
    model.require(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise FieldError("prompt", "and `messages` exclude each other", "send one of them")
    text, special = fields.prompt, fields.prompt is not None
    to_ids = model.tokenizer.encode
    if text is None:
        to_ids = model.tokenizer.control_tokens.encode
        text = chat_text(fields, model)
    if fields.add_special_tokens is not None:
        special = fields.add_special_tokens
    if len(text) > MIN_TEXT_LIMIT:
        model.require_length("prompt", text)
    ids = to_ids(text, add_special_tokens=special)[-(fields.truncate_prompt_tokens or 0) :]
    shown = None
    if fields.return_token_strs:
        shown = [model.tokenizer.raw.id_to_token(i) or "" for i in ids]
    return msgspec.json.encode(Tokenized(len(ids), model.max_model_len, ids, shown))


def detokenize(body: bytes, model: ServedModel) -> bytes:
    fields = take_fields(decode_object(body), DetokenizeFields)
    model.require(fields.model)
    limit = max(model.max_model_len, MIN_TEXT_LIMIT)
    if len(fields.tokens) > limit:
        raise FieldError("tokens", f"are {len(fields.tokens)}", f"send <= {limit}")
    size = model.tokenizer.vocab_size
    if not all(0 <= i < size for i in fields.tokens):
        raise FieldError("tokens", "contains an id out of range", f"use ids in [0, {size})")
    return msgspec.json.encode(
        Detokenized(model.tokenizer.decode(fields.tokens, skip_special_tokens=False))
    )
