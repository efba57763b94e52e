"""Settings of a command: one struct, whose fields are flags, environment variables and keys of a
TOML file under one name (`--max-slots`, `CBATCH_MAX_SLOTS`, `max_slots`). A flag counts more than
the environment, and that more than the file. What is wrong is told with where it came from."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from cbatch.core.errors import FieldError

PREFIX = "CBATCH_"
T = TypeVar("T", bound=msgspec.Struct)


def option(group: str, text: str, metavar: str | None = None) -> Meta:
    """Of a field: the group of its flag, and what the help says."""
    return Meta(description=text, extra={"group": group, "metavar": metavar})


class _Field:
    def __init__(self, info: msgspec.structs.FieldInfo) -> None:
        self.name, self.type, self.default = info.name, info.type, info.default
        metas = [each for each in get_args(info.type) if isinstance(each, Meta)]
        ((text, extra),) = [(m.description, m.extra) for m in metas if m.extra is not None]
        self.help, self.group, self.metavar = text or "", extra["group"], extra["metavar"]
        plain = get_args(info.type)[0] if get_origin(info.type) is Annotated else info.type
        kinds = get_args(plain) if get_origin(plain) in (UnionType, Union) else (plain,)
        (self.plain,) = [kind for kind in kinds if kind is not NoneType]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def repeats(self) -> bool:
        return get_origin(self.plain) is tuple

    def add_to(self, group: argparse._ActionsContainer) -> None:
        shown = self.default not in (None, False, ())
        text = f"{self.help} (default: {self.default})" if shown else self.help
        options: dict[str, Any] = {"help": text.replace("%", "%%"), "dest": self.name}
        if self.plain is bool:
            group.add_argument(self.flag, action="store_const", const=True, **options)
            return
        if self.repeats:
            options["action"] = "append"
        if get_origin(self.plain) is Literal:
            options["metavar"] = "{" + ",".join(map(str, get_args(self.plain))) + "}"
        else:
            options["metavar"] = self.metavar or self.name.rpartition("_")[2].upper()
        group.add_argument(self.flag, **options)

    def convert(self, value: Any, origin: str, *, strict: bool) -> Any:
        try:
            return msgspec.convert(value, self.type, strict=strict)
        except msgspec.ValidationError as error:
            raise FieldError(origin, f"{value!r} is not allowed", str(error)) from error


def _fields_of(kind: type[msgspec.Struct]) -> dict[str, _Field]:
    return {info.name: _Field(info) for info in msgspec.structs.fields(kind)}


def add_flags(
    parser: argparse.ArgumentParser, kind: type[msgspec.Struct], but: Collection[str] = ()
) -> None:
    """A flag for every field `but` these, None where it is not given."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in _fields_of(kind).values():
        if field.name in but:
            continue
        if field.group not in groups:
            groups[field.group] = parser.add_argument_group(field.group)
        field.add_to(groups[field.group])


class Settings(Generic[T]):
    """`values`, and where each that is not a default came from."""

    def __init__(self, kind: type[T], layers: list[dict[str, tuple[Any, str]]]) -> None:
        merged: dict[str, tuple[Any, str]] = {}
        for layer in layers:
            merged |= layer
        self.values = kind(**{name: value for name, (value, _) in merged.items()})
        self._flags = {name: field.flag for name, field in _fields_of(kind).items()}
        self._origins = {name: origin for name, (_, origin) in merged.items()}

    def origin(self, name: str) -> str:
        """What to call a field in a message: as it was given, else its flag."""
        return self._origins.get(name, self._flags[name])

    def named(self, error: FieldError, names: Mapping[str, str]) -> FieldError:
        """The error under the name that the operator knows. `names` are those of fields here by
        what others call them."""
        name = error.field.partition(".")[0]
        name = names.get(name, name)
        if name not in self._flags:
            return error
        return FieldError(self.origin(name), error.problem, error.remedy)


def read_settings(
    kind: type[T],
    args: argparse.Namespace,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Settings[T]:
    """Raises `FieldError` naming the flag, the variable, or the file and its key."""
    fields = _fields_of(kind)
    layers = [] if file is None else [_of_file(file, fields)]
    return Settings(
        kind, [*layers, _of_environment(environment or {}, fields), _of_flags(args, fields)]
    )


def unknown_variables(environment: Mapping[str, str], kind: type[msgspec.Struct]) -> list[str]:
    """Variables that look like ours and are not: most likely misspelt."""
    known = {PREFIX + name.upper() for name in (*_fields_of(kind), "config")}
    found = [name for name in environment if name.startswith(PREFIX) and name not in known]
    return [name for name in found if not name.startswith(_LINKS)]


# A service named `cbatch` makes Kubernetes set these, and CBATCH_PORT to an address.
_LINKS = (f"{PREFIX}SERVICE_", f"{PREFIX}PORT_")
_LINK_ADDRESS = "tcp://"

Layer = dict[str, tuple[Any, str]]


def _of_flags(args: argparse.Namespace, fields: Mapping[str, _Field]) -> Layer:
    given = {name: value for name in fields if (value := getattr(args, name)) is not None}
    return {
        name: (fields[name].convert(value, fields[name].flag, strict=False), fields[name].flag)
        for name, value in given.items()
    }


def _of_environment(environment: Mapping[str, str], fields: Mapping[str, _Field]) -> Layer:
    layer = {}
    for name, field in fields.items():
        variable = PREFIX + name.upper()
        text = environment.get(variable)
        if text is None or text.startswith(_LINK_ADDRESS):
            continue
        value: Any = text
        if field.repeats:
            value = [part.strip() for part in text.split(",") if part.strip()]
        layer[name] = (field.convert(value, variable, strict=False), variable)
    return layer


def _of_file(path: Path, fields: Mapping[str, _Field]) -> Layer:
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FieldError(str(path), f"cannot be read ({error})", "name a TOML file") from error
    layer = {}
    for name, value in found.items():
        origin = f"{path}: {name}"
        if name not in fields:
            raise FieldError(origin, "is not known", f"use {', '.join(sorted(fields))}")
        layer[name] = (fields[name].convert(value, origin, strict=True), origin)
    return layer
