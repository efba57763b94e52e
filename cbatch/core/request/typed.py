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

_fields = functools.cache(msgspec.structs.fields)


def knob(group: str, text: str, metavar: str | None = None, **more: Any) -> Meta:
    """Mark a field that an operator may set: `cbatch.cli.settings` makes a flag, a variable and a
    key of TOML of it. `group` and `text` are for the help. Further keywords say how the setting
    differs from its field: `name`, hidden `aliases`, `type`, the `unit` as a multiple of the
    field's, `negated`, and the `default` to show in place of None."""
    return Meta(description=text, extra={"group": group, "metavar": metavar, **more})


def convert_fields(struct: msgspec.Struct) -> None:
    """Give every field its type, in `__post_init__`: a list or a lone text becomes a tuple, a path
    its text, a number of numpy one of Python. Raises `FieldError` for a value that fits no type."""
    for field in _fields(type(struct)):
        given = value = getattr(struct, field.name)
        if given is field.default:
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
            raise FieldError(field.name, f"{short(given)} is not allowed", remedy) from error
        msgspec.structs.force_setattr(struct, field.name, value)


def kinds_of(annotation: Any) -> list[Any]:
    """The types of a union without None, or the one type, of what may be annotated."""
    plain = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    kinds = get_args(plain) if get_origin(plain) in (UnionType, Union) else (plain,)
    return [kind for kind in kinds if kind is not NoneType]


def require_text(field: str, value: Any) -> None:
    """Raise `FieldError` for half of a surrogate pair in a text, at any depth of a JSON value: JSON
    can say it, UTF-8 cannot. The error names the place, such as `messages[0].content`."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            problem = f"character {error.start} is half of a surrogate pair"
            raise FieldError(field or "body", problem, "write whole characters") from error
    elif isinstance(value, dict):
        for name, each in value.items():
            require_text(field, name)
            require_text(f"{field}.{name}" if field else str(name), each)
    elif isinstance(value, list | tuple):
        for at, each in enumerate(value):
            require_text(f"{field}[{at}]", each)
