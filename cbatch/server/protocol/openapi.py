"""The OpenAPI 3.1 document, generated from the types that check the requests."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import version
from typing import Any

import msgspec

from cbatch.core.request.from_json import STRUCTURED_FIELDS
from cbatch.core.request.request import NONE_VALUES, RANGES, SamplingParams
from cbatch.server.protocol import anthropic_request, fields, requests, responses, responses_request

Schema = dict[str, Any]
_REF = "#/components/schemas/"
_PLAIN: Schema = {"type": "object"}
# By path: the body of a POST, its required members, and the answer.
_CALLS: dict[str, tuple[Any, tuple[str, ...], Any]] = {
    "/v1/completions": (fields.CompletionFields, ("prompt",), responses.CompletionResponse),
    "/v1/chat/completions": (requests.ChatFields, ("messages",), responses.ChatCompletion),
    "/v1/responses": (responses_request.ResponsesFields, ("input",), None),
    "/v1/responses/input_tokens": (responses_request.ResponsesFields, ("input",), None),
    "/v1/messages": (anthropic_request.AnthropicFields, ("messages", "max_tokens"), None),
    "/v1/messages/count_tokens": (anthropic_request.AnthropicFields, ("messages",), None),
    "/tokenize": (requests.TokenizeFields, (), responses.Tokenized),
    "/detokenize": (requests.DetokenizeFields, ("tokens",), responses.Detokenized),
}
_GETS = ("/v1/models", "/v1/models/{name}", "/v1/responses/{name}", "/health", "/ready", "/version")
_REFUSED = {
    "ResponsesFields": responses_request.REFUSED_FIELDS,
    "AnthropicFields": anthropic_request.REFUSED_FIELDS,
}
_CHAT_ONLY = ("chat_template_kwargs", "include_reasoning")  # that other APIs take from chats


@lru_cache(maxsize=1)
def document(**defaults: float) -> Schema:
    """Return the document. `defaults` are the model's sampling defaults, see `ServedModel`."""
    kinds = [kind for body, _, answer in _CALLS.values() for kind in (body, answer) if kind]
    kinds += [SamplingParams, responses.Error]
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REF + "{name}")
    sampling = schemas.pop("SamplingParams")["properties"]
    for name, (minimum, maximum, _) in RANGES.items():
        lowest = min(minimum, *NONE_VALUES.get(name, (minimum,)))
        _narrow(sampling[name], {"minimum": lowest, "maximum": maximum})
    for name, limit in fields.LIMITS.items():
        if "anyOf" in limit:
            sampling[name] = limit
        else:
            _narrow(sampling[name], limit)
    members = schemas["StructuredOutputs"]["properties"]
    sampling |= {name: members[member] for name, member in STRUCTURED_FIELDS.items()}
    sampling["max_completion_tokens"] = sampling["max_tokens"]
    chat_length = {"default": defaults.pop("max_tokens", None)}
    for name, value in defaults.items():
        sampling[name] = sampling[name] | {"default": value}
    chat = schemas["ChatFields"]["properties"]
    shared = (*fields.RequestFields.__struct_fields__, *_CHAT_ONLY)
    for kind, required, _ in reversed(_CALLS.values()):  # of two paths, the first decides
        name, properties = kind.__name__, dict[str, Schema]()
        if name in ("CompletionFields", "ChatFields", *_REFUSED):
            properties |= sampling
        if name == "ChatFields":
            lengths = ("max_tokens", "max_completion_tokens")
            properties |= {each: sampling[each] | chat_length for each in lengths}
        elif name in _REFUSED:
            properties |= {each: chat[each] for each in shared}
            properties = {n: s for n, s in properties.items() if n not in _REFUSED[name]}
        properties = properties | schemas[name].get("properties", {})
        may_be_null = {n: {"anyOf": [schema, {"type": "null"}]} for n, schema in properties.items()}
        given = {n: properties[n] for n in required}
        schemas[name] = {**_PLAIN, "properties": may_be_null | given, "required": list(required)}
    keys = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "cbatch", "version": version("cbatch")},
        "paths": {path: _path(path) for path in (*_CALLS, *_GETS)},
        "components": {"schemas": schemas, "securitySchemes": keys},
        "security": [{}, {"key": []}],
    }


def _narrow(schema: Schema, limit: Schema) -> None:
    """Add a limit to a schema; if null is allowed, to the alternative that is not null."""
    schema.get("anyOf", [schema])[0].update(limit)


def _path(path: str) -> Schema:
    def answered(what: str, schema: Schema) -> Schema:
        return {"description": what, "content": {"application/json": {"schema": schema}}}

    body, _, answer = _CALLS.get(path, (None, (), None))
    whole = answered("the answer", {"$ref": _REF + answer.__name__} if answer else _PLAIN)
    if body is None:
        item: Schema = {"get": {"responses": {"200": whole, "default": answered("an error", {})}}}
        if path.endswith("{name}"):
            place = {"name": "name", "in": "path", "required": True}
            item["parameters"] = [place | {"schema": {"type": "string", "minLength": 1}}]
        return item
    whole["content"]["text/event-stream"] = {"schema": {}}
    error = _PLAIN if body is anthropic_request.AnthropicFields else {"$ref": _REF + "Error"}
    content = {"application/json": {"schema": {"$ref": _REF + body.__name__}}}
    answers = {"200": whole, "default": answered("an error that names the field", error)}
    return {"post": {"requestBody": {"required": True, "content": content}, "responses": answers}}
