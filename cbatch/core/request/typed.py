"""Conversion of struct fields to their types, and marks of the fields that an operator may set."""

from __future__ import annotations

import functools
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import FieldInfo

from cbatch.core.request.errors import FieldError, short

_fields = functools.cache(msgspec.structs.fields)


def knob(group: str, text: str, metavar: str | None = None, **more: Any) -> Meta:
    """Mark a field that an operator may set: `cbatch.cli.settings` gives it a flag, an environment
    variable and a TOML key. `group` and `text` are for the help. Other keywords are for a setting
    that differs from its field: its `name`, hidden `aliases`, `type`, and the `default` to show in
    place of None."""
    return Meta(description=text, extra={"group": group, "metavar": metavar, **more})


def names_of(field: FieldInfo) -> tuple[str, ...]:
    """Return the name of a field's setting, then its aliases."""
    more = mark_of(field).extra or {}
    # A flag takes one id of a list at a time, so its name is in the singular.
    singular = field.name.removesuffix("s") if field.name.endswith("_ids") else field.name
    return more.get("name", singular), *more.get("aliases", ())


def mark_of(field: FieldInfo) -> Meta:
    """Return the field's `knob`, or an empty `Meta`."""
    marks = [each for each in get_args(field.type) if isinstance(each, Meta) and each.extra]
    return marks[0] if marks else Meta()


def convert_fields(struct: msgspec.Struct) -> None:
    """Convert every field of a struct to its annotated type, in place; call in `__post_init__`.

    A list or a single string becomes a tuple, a path a string, a numpy number a Python number.
    Raises `FieldError` for a value that cannot be converted.
    """
    for field in _fields(type(struct)):
        original = value = getattr(struct, field.name)
        if value is field.default:
            continue
        origins = [get_origin(kind) for kind in types_of(field.type)]
        if isinstance(value, np.generic | np.ndarray):
            value = value.tolist()
        elif isinstance(value, PurePath):
            value = str(value)
        elif isinstance(value, str) and tuple in origins:
            value = (value,)
        try:
            value = msgspec.convert(value, field.type, str_keys=True)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            values = [v for kind in types_of(field.type) for v in get_args(kind)]
            only_literals = set(origins) == {Literal}
            remedy = f"use {' or '.join(map(repr, values))}" if only_literals else str(error)
            raise FieldError(field.name, f"{short(original)} is not allowed", remedy) from error
        msgspec.structs.force_setattr(struct, field.name, value)


def converted(name: str, value: Any, kind: Any) -> Any:
    """Return `value` as type `kind`. Raises `FieldError` naming the field `name`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise FieldError(name, f"{short(value)} is not allowed", str(error)) from error


def types_of(annotation: Any) -> list[Any]:
    """Return the types that an annotation allows, without None."""
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
