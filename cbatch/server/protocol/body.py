"""Reading of JSON bodies into structs. Each field is checked separately, so that an error names
it."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from cbatch.core.request.errors import FieldError
from cbatch.core.request.typed import converted, require_text

# Limit of lists and objects in a body: millions would hold the interpreter lock for a second.
MAX_CONTAINERS = 250_000
MAX_MEMBERS = 4096  # of the body's object
MAX_IGNORED = 64  # names of unknown members to report, of which a body may have many
AnyStruct = TypeVar("AnyStruct", bound=msgspec.Struct)


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
    """Remove the fields that `kind` declares from `record` and check them. Raises `FieldError`."""
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
