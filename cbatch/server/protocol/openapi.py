"""The OpenAPI 3.1 document, generated from the types that check the requests."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import version
from typing import Any

import msgspec

from cbatch.core.request.from_json import STRUCTURED_FIELDS
from cbatch.core.request.request import (
    DRAFTERS,
    MAX_LOGIT_BIAS,
    MAX_SEED,
    MAX_TOP_LOGPROBS,
    SamplingParams,
)
from cbatch.server.protocol import anthropic_request, responses, responses_request
from cbatch.server.protocol.requests import (
    MAX_CHOICES,
    MAX_STOP_CHARS,
    MAX_STOPS,
    ChatFields,
    CompletionFields,
    RequestFields,
    TokenizeFields,
)
from cbatch.server.protocol.texts import DetokenizeFields
from cbatch.text.messages import ROLES

Schema = dict[str, Any]
REF = "#/components/schemas/{name}"
_TOKEN = {"type": "integer", "minimum": 0}
_IDS = {"type": "array", "items": _TOKEN, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
_PROMPT = {
    "oneOf": [_TEXT, {"type": "array", "items": {"oneOf": [_TEXT, _IDS]}, "minItems": 1}, _IDS],
    "description": "a text, its token ids, or a list of either",
}
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {"oneOf": [{"type": "string"}, {"type": "array", "items": _PART}]},
    },
    "required": ["role", "content"],
}
_MESSAGES = {"type": "array", "items": _MESSAGE, "minItems": 1}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_ANTHROPIC_ERROR: Schema = {
    "type": "object",
    "properties": {"type": {"const": "error"}, "error": {"type": "object"}},
    "required": ["type", "error"],
}
_COUNT = {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
# Limits that `SamplingParams` checks in code, and not by its types.
_LIMITS: dict[str, Schema] = {
    "max_tokens": _COUNT,
    "max_completion_tokens": _COUNT,
    "min_tokens": {"minimum": 0, "maximum": 2**31 - 1},
    "temperature": {"minimum": 0},
    "top_k": _COUNT | {"minimum": -1},
    "top_p": {"minimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "seed": {"minimum": -1, "maximum": MAX_SEED},
    "n": {"minimum": 1, "maximum": MAX_CHOICES},
    "stop": {"oneOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]},
    "repetition_penalty": {"minimum": 1e-3, "maximum": 1e3},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "logprobs": {"minimum": 0, "maximum": MAX_TOP_LOGPROBS},
    "prompt_logprobs": {"minimum": 0, "maximum": MAX_TOP_LOGPROBS},
    "logit_bias": {
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {
            "type": "number",
            "minimum": -MAX_LOGIT_BIAS,
            "maximum": MAX_LOGIT_BIAS,
        },
    },
    "stop_token_ids": {"items": _TOKEN},
    "allowed_token_ids": {"items": _TOKEN, "minItems": 1},
    "banned_token_ids": {"items": _TOKEN},
    "drafter": {"items": {"enum": list(DRAFTERS)}, "minItems": 1, "uniqueItems": True},
    "max_lookahead": {"minimum": 0, "maximum": 2**31 - 1},
}


@lru_cache(maxsize=1)
def document(**defaults: float) -> Schema:
    """Return the document. `defaults` are the model's sampling defaults, see `ServedModel`."""
    kinds = [CompletionFields, ChatFields, TokenizeFields, DetokenizeFields, SamplingParams]
    kinds += [responses_request.ResponsesFields, anthropic_request.AnthropicFields]
    answers = [
        responses.CompletionResponse,
        responses.ChatCompletion,
        responses.Tokenized,
        responses.Detokenized,
    ]
    _, schemas = msgspec.json.schema_components(
        [*kinds, *answers, responses.Error], ref_template=REF
    )
    sampling = _sampling_schemas(schemas.pop("SamplingParams")["properties"])
    members = schemas["StructuredOutputs"]["properties"]
    sampling |= {name: members[member] for name, member in STRUCTURED_FIELDS.items()}
    chat_default = {"default": defaults.pop("max_tokens")} if "max_tokens" in defaults else {}
    for name, value in defaults.items():
        sampling[name] = sampling[name] | {"default": value}
    prompts, messages = {"prompt": _PROMPT}, {"messages": _MESSAGES}
    chat = schemas["ChatFields"]["properties"]
    names = (*RequestFields.__struct_fields__, "chat_template_kwargs", "include_reasoning")
    common = sampling | {name: chat[name] for name in names}
    for module, kind, required in (
        (responses_request, "ResponsesFields", ("input",)),
        (anthropic_request, "AnthropicFields", ("messages", "max_tokens")),
    ):
        own = schemas[kind]["properties"]
        shared = {name: common[name] for name in common if name not in module.REFUSED_FIELDS}
        schemas[kind] = _body_schema(schemas[kind], shared, {name: own[name] for name in required})
    schemas["CompletionFields"] = _body_schema(schemas["CompletionFields"], sampling, prompts)
    lengths = {name: _COUNT | chat_default for name in ("max_tokens", "max_completion_tokens")}
    schemas["ChatFields"] = _body_schema(schemas["ChatFields"], sampling | lengths, messages)
    schemas["TokenizeFields"] = _body_schema(schemas["TokenizeFields"], {}, {})
    schemas["TokenizeFields"]["properties"]["messages"] = _or_null(_MESSAGES)
    return {
        "openapi": "3.1.0",
        "info": {"title": "cbatch", "version": version("cbatch")},
        "paths": _paths(),
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _sampling_schemas(properties: dict[str, Schema]) -> dict[str, Schema]:
    properties["max_completion_tokens"] = {}
    return {
        name: limit if "oneOf" in limit else _limited(schema, limit)
        for name, schema in properties.items()
        for limit in (_LIMITS.get(name, {}),)
    }


def _limited(schema: Schema, limit: Schema) -> Schema:
    if "anyOf" not in schema:
        return {**schema, **limit}
    first, *rest = schema["anyOf"]
    return {**schema, "anyOf": [{**first, **limit}, *rest]}


def _body_schema(
    fields: Schema, sampling: dict[str, Schema], required: dict[str, Schema]
) -> Schema:
    """Return a request's schema. Fields that are not required may also be null."""
    properties = {
        name: _or_null(schema) for name, schema in (sampling | fields["properties"]).items()
    }
    return {"type": "object", "properties": properties | required, "required": list(required)}


def _or_null(schema: Schema) -> Schema:
    if {"type": "null"} in schema.get("anyOf", ()):
        return schema
    return {"anyOf": [schema, {"type": "null"}]}


def _ref(name: str) -> Schema:
    return {"$ref": REF.format(name=name)}


def _json_response(description: str, schema: Schema) -> Schema:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _paths() -> dict[str, Schema]:
    plain: Schema = {"type": "object"}
    text = {"content": {"text/plain": {"schema": {"type": "string"}}}}
    name = {"name": "name", "in": "path", "required": True, "schema": _TEXT}
    return {
        "/v1/completions": _post("CompletionFields", "CompletionResponse", streamed=True),
        "/v1/chat/completions": _post("ChatFields", "ChatCompletion", streamed=True),
        "/v1/responses": _post("ResponsesFields", None, streamed=True),
        "/v1/responses/input_tokens": _post("ResponsesFields", None),
        "/v1/responses/{response_id}": {
            **_get("a stored response", plain, 404),
            "delete": _get("it is no longer stored", plain, 404)["get"],
            "parameters": [name | {"name": "response_id"}],
        },
        "/v1/messages": _post("AnthropicFields", None, streamed=True, error=_ANTHROPIC_ERROR),
        "/v1/messages/count_tokens": _post("AnthropicFields", None, error=_ANTHROPIC_ERROR),
        "/tokenize": _post("TokenizeFields", "Tokenized"),
        "/detokenize": _post("DetokenizeFields", "Detokenized"),
        "/v1/models": _get("models", plain),
        "/v1/models/{name}": {**_get("a model", plain, 404), "parameters": [name]},
        "/health": _get("whether the server is alive", plain, 503),
        "/ready": _get("whether the server accepts calls", plain, 503),
        "/version": _get("the version", plain),
        "/metrics": {"get": {"responses": {"200": {"description": "for Prometheus", **text}}}},
    }


def _post(
    body: str, answer: str | None, *, streamed: bool = False, error: Schema | None = None
) -> Schema:
    whole = _json_response("the answer", {"type": "object"} if answer is None else _ref(answer))
    if streamed:
        # All chunks but the last are JSON, which OpenAPI 3.1 cannot express.
        whole["content"]["text/event-stream"] = {"schema": {}}
    statuses = {
        400: "a field that is not supported; the error names it",
        401: "no valid API key",
        404: "another model, or an unknown response",
        408: "the call took too long to arrive, or its own timeout expired",
        413: "the body is too large",
        415: "the content type is not JSON",
        429: "the key has too many open calls; Retry-After says when to try again",
        431: "the head is too large",
        500: "the request failed",
        503: "the queue is full, or there is no engine; Retry-After says when to try again",
        504: "the server's time limit for a call is over",
    }
    error = error or _ref("Error")
    failures = {str(status): _json_response(text, error) for status, text in statuses.items()}
    content = {"application/json": {"schema": _ref(body)}}
    return {
        "post": {
            "requestBody": {"required": True, "content": content},
            "responses": {"200": whole, **failures},
        }
    }


def _get(description: str, schema: Schema, *others: int) -> Schema:
    failures = {str(status): _json_response("not available", {}) for status in (401, *others)}
    return {"get": {"responses": {"200": _json_response(description, schema), **failures}}}
