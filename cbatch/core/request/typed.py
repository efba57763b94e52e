"""Fields of structs: values of the right type, and which of them an operator may set."""

from __future__ import annotations

import functools
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import numpy as np
from msgspec import Meta

from cbatch.core.request.errors import FieldError, short

# Fields of the scheduler's configuration, by their names in files that earlier versions wrote.
OLD_NAMES = {
    "block_size_tokens": "block_size",
    "max_model_tokens": "max_model_len",
    "max_slots": "max_num_seqs",
    "prefix_cache": "enable_prefix_caching",
    "step_budget_tokens": "max_num_batched_tokens",
}
_fields = functools.cache(msgspec.structs.fields)


def knob(group: str, text: str, metavar: str | None = None, **more: Any) -> Meta:
    """Mark a field that an operator may set: `cbatch.cli.settings` makes a flag, a variable and a
    key of TOML of it. `group` and `text` are for the help. Further keywords say how the setting
    differs from its field: `name`, hidden `aliases`, `type`, the `unit` as a multiple of the
    field's, `negated`, and the `default` to show in place of None."""
    return Meta(description=text, extra={"group": group, "metavar": metavar, **more})


def convert_fields(struct: msgspec.Struct) -> None:
    """Convert every field of a struct to its annotated type, in place; call in `__post_init__`.

    A list or a single string becomes a tuple, a path a string, a numpy number a Python number.
    Raises `FieldError` for a value that cannot be converted.
    """
    for field in _fields(type(struct)):
        original = value = getattr(struct, field.name)
        if value is field.default:
            continue
        origins = [get_origin(kind) for kind in kinds_of(field.type)]
        if isinstance(value, np.generic | np.ndarray):
            value = value.tolist()
        elif isinstance(value, PurePath):
            value = str(value)
        elif isinstance(value, str) and tuple in origins:
            value = (value,)
        try:
            value = msgspec.convert(value, field.type, str_keys=True)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            values = [v for kind in kinds_of(field.type) for v in get_args(kind)]
            only = set(origins) == {Literal}
            remedy = f"use {' or '.join(map(repr, values))}" if only else str(error)
            raise FieldError(field.name, f"{short(original)} is not allowed", remedy) from error
        msgspec.structs.force_setattr(struct, field.name, value)


def kinds_of(annotation: Any) -> list[Any]:
    """Return the members of a union without None, or the single type, of a field's annotation."""
    plain = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    kinds = get_args(plain) if get_origin(plain) in (UnionType, Union) else (plain,)
    return [kind for kind in kinds if kind is not NoneType]


def require_text(field: str, value: Any) -> None:
    """Raise `FieldError` if a string at any depth of a JSON value has half of a surrogate pair:
    JSON can contain one, UTF-8 cannot. The error names the place, such as `messages[0].content`."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            problem = f"character {error.start} is half of a surrogate pair"
            raise FieldError(field or "body", problem, "write whole characters") from error
    elif isinstance(value, dict):
        for name, member in value.items():
            require_text(field, name)
            require_text(f"{field}.{name}" if field else str(name), member)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            require_text(f"{field}[{index}]", item)
