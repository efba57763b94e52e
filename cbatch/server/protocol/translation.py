"""Translation of other APIs' requests into chats, whose parser, prompts and texts they share."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import structs

from cbatch.core.request.errors import FieldError, too_long
from cbatch.engine.unsupported import Missing
from cbatch.server.protocol.fields import (
    MAX_CONTAINERS,
    MAX_IGNORED,
    ApiRequest,
    decode_object,
    take_fields,
    unknown_members,
)
from cbatch.server.protocol.model import ServedModel
from cbatch.server.protocol.requests import parse_chat

AnyError = TypeVar("AnyError", bound=FieldError)
AnyFields = TypeVar("AnyFields", bound=msgspec.Struct)
# Names in another API of a chat's fields: regular expressions and their replacements.
FieldNames = dict[str, str]
# A body has at most this many brackets per token of the context, and some for other members. More
# fit no context, and their objects would take ten times the memory of the body.
_BRACKETS_PER_TOKEN, _FREE_BRACKETS = 16, 2**14
_LOGPROBS = Missing("log probabilities in this API", False, 0, remedy="use chat completions")
OTHER_NAME = Missing("this name of chat completions", remedy="use this API's own field")
# Fields of chats that other APIs lack or name otherwise, with values that do not use them.
REFUSED: dict[str, Missing] = {
    "n": Missing("more than one choice", 1),
    "logprobs": _LOGPROBS,
    "top_logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "return_token_ids": Missing("token ids in this API", False),
    "return_metrics": Missing("metrics in this API", False),
    **dict.fromkeys(("max_completion_tokens", "reasoning_effort", "response_format"), OTHER_NAME),
}
NAMES: FieldNames = {
    r"(tools\[\d+\])\.function\b": r"\1",
    r"prompt$": "messages",
    r"messages\b.*": "messages",
}


class ReadBody(msgspec.Struct, Generic[AnyFields]):
    """A body whose own `fields` were read: all members as `sent`, and those that a chat has as well
    (`rest`)."""

    fields: AnyFields
    sent: dict[str, Any]
    rest: dict[str, Any]

    def ignored(self) -> Iterable[str]:
        """Return names of unknown members of `fields`, which takes time for each part."""
        known = {name: self.sent[name] for name in self.sent if name not in self.rest}
        return unknown_members(known, self.fields, "")


def read_body(
    body: bytes, kind: type[AnyFields], refused: Mapping[str, Missing], model: ServedModel
) -> ReadBody[AnyFields]:
    limit = _BRACKETS_PER_TOKEN * model.max_model_len + _FREE_BRACKETS
    record = decode_object(body, min(limit, MAX_CONTAINERS))
    for name in record.keys() & refused.keys():
        refused[name].check(name, record[name])
    rest = {name: value for name, value in record.items() if name not in refused}
    sent = dict(rest)
    return ReadBody(take_fields(rest, kind), sent, rest)


def chat_request(
    chat: dict[str, Any],
    model: ServedModel,
    names: FieldNames,
    ignored: Iterable[str],
    **call: Any,
) -> ApiRequest:
    """Return the request for a chat's body. `ignored` are unknown fields of the API's own body.
    `call` is as for `parse_chat`. Raises `FieldError`, with the API's `names`."""
    present = {name: value for name, value in chat.items() if value is not None}
    try:
        request = parse_chat(msgspec.json.encode(present), model, **call)
    except FieldError as error:
        raise renamed(error, names) from error
    ignored = (*(rename(name, names) for name in request.ignored), *islice(ignored, MAX_IGNORED))
    return structs.replace(request, ignored=ignored)


def rename(field: str, names: FieldNames) -> str:
    for pattern, replacement in names.items():
        field = re.sub(rf"^{pattern}", replacement, field)
    return field


def renamed(error: AnyError, names: FieldNames) -> AnyError:
    def text(value: str) -> str:
        return re.sub("`([^`]+)`", lambda match: f"`{rename(match[1], names)}`", value)

    field = rename(error.field, names)
    return type(error)(field, text(error.problem), text(error.remedy))


def require_parts(field: str, lists: Iterable[object], model: ServedModel) -> None:
    """Check the number of parts of a conversation, of which each has at least one token, before any
    is translated. Values that are not `lists` are ignored. Raises `FieldError`."""
    num_parts = 0
    for parts in lists:
        num_parts += len(parts) if isinstance(parts, list) else 0
        if num_parts > model.max_model_len:
            raise too_long(field, f"at least {num_parts}", model.max_model_len)


@lru_cache(maxsize=64)
def log_skipped(what: str, kind: str) -> None:
    """Log once that this is left out of prompts. Both words are from the code, not a client."""
    logging.getLogger("cbatch").warning("%s of the type %s are left out of prompts", what, kind)


def unsupported(field: str, kind: str, *types: str) -> FieldError:
    remedy = f"send type {' or '.join(types)}"
    return FieldError(f"{field}.type", f"{kind!r} is not supported", remedy)


def text_parts(content: Any, field: str, *types: str) -> str | list[dict[str, str]]:
    """Return a chat's content for parts of these `types`. Raises `FieldError` for others."""
    if isinstance(content, str):
        return content
    if isinstance(content, dict):
        raise FieldError(field, "is an object", "send a text, or a list of parts")
    for at, part in enumerate(content):
        if part.type not in types:
            raise unsupported(f"{field}[{at}]", part.type, *types)
    texts = (part.refusal if part.type == "refusal" else part.text for part in content)
    return [{"type": "text", "text": text} for text in texts]


def function_tool(
    name: str, description: str | None, parameters: Any, strict: Any
) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function | {"strict": strict}}


def named_choice(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}
