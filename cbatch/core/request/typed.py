"""Values of the right type in structs that callers construct."""

from __future__ import annotations

import functools
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec
import numpy as np

from cbatch.core.request.errors import FieldError, short


def convert_fields(struct: msgspec.Struct) -> None:
    """Give every field its type, in `__post_init__`: a list or a lone text becomes a tuple, a path
    its text, a number of numpy one of Python. Raises `FieldError` for a value that fits no type."""
    for field in _fields(type(struct)):
        given = value = getattr(struct, field.name)
        if given is field.default:
            continue
        if isinstance(value, np.generic | np.ndarray):
            value = value.tolist()
        elif isinstance(value, PurePath):
            value = str(value)
        elif isinstance(value, str) and field.repeats:
            value = (value,)
        try:
            value = msgspec.convert(value, field.type, str_keys=True)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            remedy = field.remedy or str(error)
            raise FieldError(field.name, f"{short(given)} is not allowed", remedy) from error
        msgspec.structs.force_setattr(struct, field.name, value)


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


class _Field(NamedTuple):
    name: str
    type: Any
    default: Any
    repeats: bool  # a tuple
    remedy: str  # names the values of a `Literal`; empty for other types


@functools.cache
def _fields(struct: type[msgspec.Struct]) -> list[_Field]:
    return [_field(each) for each in msgspec.structs.fields(struct)]


def _field(info: msgspec.structs.FieldInfo) -> _Field:
    plain = get_args(info.type)[0] if get_origin(info.type) is Annotated else info.type
    kinds = get_args(plain) if get_origin(plain) in (UnionType, Union) else (plain,)
    origins = {get_origin(each) for each in kinds if each is not NoneType}
    remedy = ""
    if origins == {Literal}:
        values = [value for each in kinds for value in get_args(each)]
        remedy = f"use {' or '.join(map(repr, values))}"
    return _Field(info.name, info.type, info.default, tuple in origins, remedy)
