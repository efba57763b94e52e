"""The work of /tokenize and /detokenize, from request body to response body. Runs in workers."""

from __future__ import annotations

import msgspec

from cbatch.core.request.errors import FieldError
from cbatch.server.protocol.body import decode_object, take_fields
from cbatch.server.protocol.model import ServedModel
from cbatch.server.protocol.requests import TokenizeFields, chat_text
from cbatch.server.protocol.responses import Detokenized, Tokenized

# This many characters, or token ids, are allowed even if the model's context is shorter.
MIN_TEXT_LIMIT = 2**18


class DetokenizeFields(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[int]  # at most the context length


def tokenize(body: bytes, model: ServedModel) -> bytes:
    """Return the body of the response. Raises `FieldError`."""
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
    """Return the body of the response. Raises `FieldError`."""
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
