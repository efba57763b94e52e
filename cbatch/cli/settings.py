"""Settings of a command, declared as fields of a struct that are marked with `knob`.

A setting is a flag, an environment variable and a key of a TOML file (`--max-num-seqs`,
`CBATCH_MAX_NUM_SEQS`, `max_num_seqs`). Flags override the environment, which overrides the file.
Nested structs add their settings to the same namespace. Errors name the flag, variable or key."""

from __future__ import annotations

import argparse
import functools
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Meta

from cbatch.core.request.errors import FieldError
from cbatch.core.request.numbers import number_problem
from cbatch.core.request.typed import mark_of, names_of, types_of
from cbatch.engine.unsupported import UNSUPPORTED_OPTIONS, require_neutral_option

PREFIX = "CBATCH_"
# Numbers as in vLLM: 32k is 32,000 and 32K is 32,768.
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT])")
_FACTORS = {
    suffix: base ** (1 + i)
    for base, suffixes in ((1000, "kmgt"), (1024, "KMGT"))
    for i, suffix in enumerate(suffixes)
}
# In cbatch/cli/serve.py, cbatch/runtime/compiled/builds.py and cbatch/engine/prices/startup.py.
_READ_ELSEWHERE = ("config", "kernels", "costs", "profile_seconds")
# Kubernetes sets these variables for a service named `cbatch`, and CBATCH_PORT to an address.
_LINKS = (f"{PREFIX}SERVICE_", f"{PREFIX}PORT_")
_LINK_ADDRESS = "tcp://"
T = TypeVar("T", bound=msgspec.Struct)
Layer = dict[str, tuple[Any, str]]  # by setting: its value, and its origin (its name in errors)


class Setting:
    """A struct's field that is marked with `knob`: its names, help, and conversion of values."""

    def __init__(self, info: msgspec.structs.FieldInfo, meta: Meta) -> None:
        extra = meta.extra or {}
        self.field, self.names = info.name, names_of(info)
        self.name = self.names[0]
        self.type = extra.get("type", info.type)
        self.help, self.group = meta.description or "", extra["group"]
        self.metavar, self.required = extra["metavar"], info.required
        self.default: Any = None if info.default is NODEFAULT else info.default  # as help shows it
        if self.default is None:
            self.default = extra.get("default")
        self.plain = types_of(types_of(self.type)[0])[0]  # without `Annotated` and None

    @property
    def flag(self) -> str:
        return flag_of(self.name) if self.group else self.metavar or self.name.upper()

    @property
    def repeats(self) -> bool:
        return get_origin(self.plain) in (tuple, dict)

    @property
    def choices(self) -> list[str]:
        return [str(each) for each in get_args(self.plain)]

    def add_to(self, group: argparse._ActionsContainer, default: Any = None) -> None:
        """Add the flag or positional argument. Help hides aliases, and the flag `--model` of a
        positional MODEL. `default` overrides the field's default in the help."""
        default = self.default if default is None else default
        has_default = default is not None and default is not False and default != ()
        text = f"{self.help} (default: {default})" if has_default else self.help
        options: dict[str, Any] = {"help": text.replace("%", "%%") or None, "dest": self.name}
        if self.plain is bool and self.name.startswith("no_"):
            options |= {"action": "store_const", "const": True}
        elif self.plain is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif get_origin(self.plain) is Literal:
            options["choices"] = self.choices
        else:
            options["metavar"] = self.metavar or self.name.rpartition("_")[2].upper()
        if self.repeats:
            options["action"] = "append"
        hidden: tuple[str, ...] = self.names[1:]
        if self.group:
            group.add_argument(self.flag, **options)
        else:
            nargs = None if self.required else "?"
            group.add_argument(self.name, nargs=nargs, help=options["help"], metavar=self.flag)
            hidden = () if self.required else (self.name,)
            options["dest"] = flag_of(self.name)
        for name in hidden:
            flags = [flag_of(name), *([f"-{name}"] if len(name) == 2 else [])]
            with suppress(argparse.ArgumentError):  # another option of the command has the name
                group.add_argument(*flags, **options | {"help": argparse.SUPPRESS})

    def convert(self, value: Any, origin: str, *, strict: bool) -> Any:
        """Convert a value to the field's type. With `strict` the value has a TOML type; otherwise
        it is text. Raises `FieldError` naming `origin`."""
        if self.plain is bool and not strict:
            value = {"on": True, "off": False}.get(value, value)
        try:
            if isinstance(value, str) and _is_struct(self.plain):
                return msgspec.json.decode(value, type=self.plain)
            if get_origin(self.plain) is tuple and isinstance(value, str):
                value = [value]  # a list of one, as with the flag
            if get_origin(self.plain) is dict and not strict:
                value = dict(each.split("=", 1) for each in value)
            size = _SIZE.fullmatch(value) if isinstance(value, str) else None
            if size and self.plain is int:
                value = int(float(size[1]) * _FACTORS[size[2]])
            result = msgspec.convert(value, self.type, strict=strict, dec_hook=_from_text)
        except (ValueError, OverflowError, msgspec.MsgspecError) as error:
            remedies: dict[Any, str] = {
                dict: f"write {self.metavar}",
                Literal: f"use {' or '.join(self.choices)}",
                bool: "use on or off",
            }
            remedy = remedies.get(get_origin(self.plain) or self.plain, str(error))
            if _is_struct(self.plain):
                remedy += f" (fields: {', '.join(self.plain.__struct_fields__)})"
            raise FieldError(origin, f"{value!r} is not allowed", remedy) from error
        if type(result) in (int, float) and (problem := number_problem(result)):
            raise FieldError(origin, f"{result} is not allowed", problem)
        return result


def flag_of(name: str) -> str:
    return f"-{name}" if len(name) == 1 else "--" + name.replace("_", "-")


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _from_text(kind: Any, value: Any) -> Any:
    return kind(value)


@functools.cache
def fields_of(kind: type[msgspec.Struct]) -> dict[str, Setting]:
    """Return the settings of a struct and its nested structs, by name, in order of declaration."""
    settings: dict[str, Setting] = {}
    for info in msgspec.structs.fields(kind):
        if _is_struct(info.type):
            settings |= fields_of(info.type)
        elif (meta := mark_of(info)).extra:
            setting = Setting(info, meta)
            settings[setting.name] = setting
    return settings


def _build(kind: type[T], values: Mapping[str, Any]) -> T:
    fields: dict[str, Any] = {}
    for info in msgspec.structs.fields(kind):
        if _is_struct(info.type):
            fields[info.name] = _build(info.type, values)
        elif mark_of(info).extra and (name := names_of(info)[0]) in values:
            fields[info.name] = values[name]
    return kind(**fields)


def add_flags(
    parser: argparse.ArgumentParser,
    kind: type[msgspec.Struct],
    *,
    exclude: Collection[str] = (),
    only: Collection[str] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Add flags for all settings except `exclude`, or only for the settings in `only`. `defaults`
    maps fields to the command's own defaults."""
    groups: dict[str, argparse._ActionsContainer] = {}
    for setting in fields_of(kind).values():
        name = setting.group
        if setting.name in exclude or (only is not None and setting.name not in only):
            continue
        if name not in groups:
            groups[name] = parser.add_argument_group(name) if name else parser
        setting.add_to(groups[name], (defaults or {}).get(setting.field))


class Settings(Generic[T]):
    """The struct `values`, and the names of the settings that were `given`. Later `layers` override
    earlier layers."""

    def __init__(self, kind: type[T], layers: list[Layer]) -> None:
        merged: Layer = {}
        for layer in layers:
            merged |= layer
        self.given = frozenset(merged)
        fields = fields_of(kind).values()
        self._origins = {each.name: each.flag for each in fields}
        self._origins |= {name: origin for name, (_, origin) in merged.items()}
        self._names = {known: each.name for each in fields for known in (each.field, each.name)}
        with self.naming():
            self.values = _build(kind, {name: value for name, (value, _) in merged.items()})

    def origin(self, name: str) -> str:
        """Return a setting's name in messages: its variable or key, otherwise its flag."""
        return self._origins[name]

    @contextmanager
    def naming(self) -> Iterator[None]:
        try:
            yield
        except FieldError as error:
            raise self.named(error) from error

    def named(self, error: FieldError) -> FieldError:
        """Return the error with the field's or flag's name replaced by the setting's `origin`."""
        field = error.field.partition(".")[0]
        name = self._names.get(field.removeprefix("--").replace("-", "_"))
        if name is None or type(error) is not FieldError:
            return error
        return FieldError(self.origin(name), error.problem, error.remedy)


def read_settings(
    kind: type[T],
    args: argparse.Namespace,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
    *,
    defaults: Mapping[str, Any] | None = None,
    origins: Mapping[str, str] | None = None,
) -> Settings[T]:
    """Read flags, the `environment` and a TOML `file`, which override the `defaults` by field.
    `origins` names settings of `args` that were not given as flags. Raises `FieldError` naming the
    flag, the variable, or the file and its key."""
    fields = fields_of(kind)
    values = defaults or {}
    layers: list[Layer] = [
        {s.name: (values[s.field], s.flag) for s in fields.values() if s.field in values},
        {} if file is None else _of_file(file, fields),
        _of_environment(environment or {}, fields),
        _of_flags(args, fields, origins or {}),
    ]
    return Settings(kind, layers)


def settings_of(kind: type[T], values: Mapping[str, Any], where: str) -> Settings[T]:
    return Settings(kind, [_of_mapping(values, fields_of(kind), where)])


def unknown_variables(environment: Mapping[str, str], kind: type[msgspec.Struct]) -> list[str]:
    """Return environment variables with `PREFIX` that name no setting: probably misspelt."""
    names = [name for setting in fields_of(kind).values() for name in setting.names]
    names += [*UNSUPPORTED_OPTIONS, *_READ_ELSEWHERE]
    known = {f"{PREFIX}{name.upper()}" for name in names}
    unknown = [name for name in environment if name.startswith(PREFIX) and name not in known]
    return [name for name in unknown if not name.startswith(_LINKS)]


def _of_flags(
    args: argparse.Namespace, fields: Mapping[str, Setting], origins: Mapping[str, str]
) -> Layer:
    layer: Layer = {}
    for name, field in fields.items():
        texts = [getattr(args, dest, None) for dest in (name, flag_of(name))]
        given = [text for text in texts if text is not None]
        if len(given) > 1:
            raise FieldError(field.flag, f"is given twice, with {flag_of(name)}", "leave one out")
        if given:
            origin = origins.get(name, field.flag)
            layer[name] = (field.convert(given[0], origin, strict=False), origin)
    return layer


def _of_environment(environment: Mapping[str, str], fields: Mapping[str, Setting]) -> Layer:
    layer: Layer = {}
    for name in UNSUPPORTED_OPTIONS:
        if variable := environment.get(PREFIX + name.upper()):
            require_neutral_option(name, variable, PREFIX + name.upper(), fields)
    for name, field in fields.items():
        for variable in (PREFIX + each.upper() for each in field.names):
            text = environment.get(variable, _LINK_ADDRESS)
            if not text.startswith(_LINK_ADDRESS) and name not in layer:
                parts = [part.strip() for part in text.split(",") if part.strip()]
                value = parts if field.repeats else text
                layer[name] = (field.convert(value, variable, strict=False), variable)
    return layer


def _of_file(path: Path, fields: Mapping[str, Setting]) -> Layer:
    try:
        document = tomllib.loads(path.read_bytes().decode())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FieldError(str(path), f"cannot be read ({error})", "name a TOML file") from error
    return _of_mapping(document, fields, str(path))


def _of_mapping(values: Mapping[str, Any], fields: Mapping[str, Setting], where: str) -> Layer:
    layer: Layer = {}
    settings = {alias: field for field in fields.values() for alias in field.names}
    for key, value in values.items():
        origin, name = f"{where}: {key}", key.replace("-", "_")
        setting = settings.get(name)
        if setting is None:
            require_neutral_option(name, value, origin, fields)
        elif setting.name in layer:
            problem = f"is given twice, with {layer[setting.name][1]}"
            raise FieldError(origin, problem, "leave one out")
        else:
            layer[setting.name] = (setting.convert(value, origin, strict=True), origin)
    return layer
