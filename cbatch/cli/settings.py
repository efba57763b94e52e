"""Settings of a command: a struct whose fields with a knob, and those of its parts, are flags,
environment variables and keys of a TOML file under one name (`--max-slots`, `CBATCH_MAX_SLOTS`,
`max_slots`). A flag counts more than the environment, and that more than the file. What is wrong is
told with where it came from."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta

from cbatch.core.request.errors import FieldError, did_you_mean
from cbatch.core.request.typed import kinds_of

PREFIX = "CBATCH_"
T = TypeVar("T", bound=msgspec.Struct)
Layer = dict[str, tuple[Any, str]]  # by setting: its value, and what to call it in a message


class _Setting:
    """What stands behind a knob: `field` is that of its struct."""

    def __init__(self, info: msgspec.structs.FieldInfo, mark: Meta) -> None:
        more = mark.extra or {}
        self.field, self.name = info.name, str(more.get("name", info.name))
        self.aliases: tuple[str, ...] = more.get("aliases", ())
        self.type = more.get("type", info.type)
        self.help, self.group, self.metavar = mark.description or "", more["group"], more["metavar"]
        self._unit, self._negated = more.get("unit"), more.get("negated", False)
        self.default = False if self._negated else info.default
        if self._unit is not None and self.default is not None:
            self.default /= self._unit
        self.plain = kinds_of(self.type)[0]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-") if self.group else self.name.upper()

    @property
    def names(self) -> tuple[str, ...]:
        """Every name by which it may be given, its own first."""
        return (self.name, *self.aliases)

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
        flags = ["--" + alias.replace("_", "-") for alias in self.aliases]
        if flags:
            group.add_argument(*flags, **options | {"help": argparse.SUPPRESS})

    def convert(self, value: Any, origin: str, *, strict: bool) -> Any:
        try:
            return msgspec.convert(value, self.type, strict=strict)
        except msgspec.ValidationError as error:
            raise FieldError(origin, f"{value!r} is not allowed", str(error)) from error

    def meant(self, value: Any) -> Any:
        """What the field is to hold."""
        if self._unit is not None and value is not None:
            return int(value * self._unit)
        return not value if self._negated else value


def _settings_of(kind: type[msgspec.Struct]) -> dict[str, _Setting]:
    """By name. Those of a part stand where the part does."""
    found: dict[str, _Setting] = {}
    for info in msgspec.structs.fields(kind):
        made = _read(info)
        found |= (
            _settings_of(made) if isinstance(made, type) else {each.name: each for each in made}
        )
    return found


def _read(info: msgspec.structs.FieldInfo) -> type[msgspec.Struct] | list[_Setting]:
    """A field is a part with settings of its own, a setting, or none."""
    if isinstance(info.type, type) and issubclass(info.type, msgspec.Struct):
        return info.type
    marks = [each for each in get_args(info.type) if isinstance(each, Meta) and each.extra]
    return [_Setting(info, mark) for mark in marks]


def _made(kind: type[T], values: Mapping[str, Any]) -> T:
    """Raises `FieldError` by the struct's own names."""
    given: dict[str, Any] = {}
    for info in msgspec.structs.fields(kind):
        read = _read(info)
        if isinstance(read, type):
            given[info.name] = _made(read, values)
        else:
            given |= {s.field: s.meant(values[s.name]) for s in read if s.name in values}
    return kind(**given)


def add_flags(
    parser: argparse.ArgumentParser, kind: type[msgspec.Struct], but: Collection[str] = ()
) -> None:
    """A flag for every setting `but` these, None where it is not given."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for setting in _settings_of(kind).values():
        if setting.name in but:
            continue
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.group)
        setting.add_to(groups[setting.group])


class Settings(Generic[T]):
    """`values`; where each came from that was `given`."""

    def __init__(self, kind: type[T], layers: list[Layer]) -> None:
        merged: Layer = {}
        for layer in layers:
            merged |= layer
        self.given = frozenset(merged)
        self._origins = {each.name: each.flag for each in _settings_of(kind).values()}
        self._origins |= {name: origin for name, (_, origin) in merged.items()}
        self._names = {each.field: each.name for each in _settings_of(kind).values()}
        try:
            self.values = _made(kind, {name: value for name, (value, _) in merged.items()})
        except FieldError as error:
            raise self.named(error) from error

    def origin(self, name: str) -> str:
        """What to call a setting in a message: as it was given, else its flag."""
        return self._origins[name]

    def named(self, error: FieldError) -> FieldError:
        """An error about a field, under the name that the operator knows."""
        name = error.field.partition(".")[0]
        name = self._names.get(name, name)
        if name not in self._origins:
            return error
        return FieldError(self.origin(name), error.problem, error.remedy)


def read_settings(
    kind: type[T],
    args: argparse.Namespace,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Settings[T]:
    """Raises `FieldError` naming the flag, the variable, or the file and its key."""
    fields = _settings_of(kind)
    layers = [] if file is None else [_of_file(file, fields)]
    return Settings(
        kind, [*layers, _of_environment(environment or {}, fields), _of_flags(args, fields)]
    )


def settings_of(kind: type[T], found: Mapping[str, Any], where: str) -> Settings[T]:
    """Of values by name, as a TOML file has them. Raises `FieldError` with `where` they stand."""
    return Settings(kind, [_of_mapping(found, _settings_of(kind), where)])


def unknown_variables(environment: Mapping[str, str], kind: type[msgspec.Struct]) -> list[str]:
    """Variables that look like ours and are not: most likely misspelt."""
    names = [name for setting in _settings_of(kind).values() for name in setting.names]
    known = {PREFIX + name.upper() for name in (*names, "config", *_READ_ELSEWHERE)}
    found = [name for name in environment if name.startswith(PREFIX) and name not in known]
    return [name for name in found if not name.startswith(_LINKS)]


_READ_ELSEWHERE = ("kernels",)  # in cbatch/runtime/cpu/compiled/builds.py
# A service named `cbatch` makes Kubernetes set these, and CBATCH_PORT to an address.
_LINKS = (f"{PREFIX}SERVICE_", f"{PREFIX}PORT_")
_LINK_ADDRESS = "tcp://"


def _of_flags(args: argparse.Namespace, fields: Mapping[str, _Setting]) -> Layer:
    given = {name: value for name in fields if (value := getattr(args, name)) is not None}
    return {
        name: (fields[name].convert(value, fields[name].flag, strict=False), fields[name].flag)
        for name, value in given.items()
    }


def _of_environment(environment: Mapping[str, str], fields: Mapping[str, _Setting]) -> Layer:
    layer = {}
    for name, field in fields.items():
        variables = [PREFIX + known.upper() for known in field.names]
        variable = next((known for known in variables if known in environment), variables[0])
        text = environment.get(variable)
        if text is None or text.startswith(_LINK_ADDRESS):
            continue
        value: Any = text
        if field.repeats:
            value = [part.strip() for part in text.split(",") if part.strip()]
        layer[name] = (field.convert(value, variable, strict=False), variable)
    return layer


def _of_file(path: Path, fields: Mapping[str, _Setting]) -> Layer:
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FieldError(str(path), f"cannot be read ({error})", "name a TOML file") from error
    return _of_mapping(found, fields, str(path))


def _of_mapping(found: Mapping[str, Any], fields: Mapping[str, _Setting], where: str) -> Layer:
    layer = {}
    own_names = {alias: name for name, field in fields.items() for alias in field.names}
    for given, value in found.items():
        origin, name = f"{where}: {given}", own_names.get(given, given)
        if name not in fields:
            problem = f"is not known{did_you_mean(name, fields)}"
            raise FieldError(origin, problem, f"use {', '.join(sorted(fields))}")
        layer[name] = (fields[name].convert(value, origin, strict=True), origin)
    return layer
