"""Structs and enums of the C headers, which are their only definition."""

from __future__ import annotations

import ctypes
import enum
import functools
import re
from ctypes import POINTER, c_double, c_float, c_int, c_long, c_void_p
from pathlib import Path
from typing import Any

_STRUCT = re.compile(r"typedef struct \{([^{}]*)\} (\w+);")
_ENUM = re.compile(r"enum (\w+) \{([^{}]*)\};")
_COMMENT = re.compile(r"//.*")
_NUMBERS: dict[str, Any]
_NUMBERS = {"long": c_long, "int": c_int, "float": c_float, "double": c_double}


@functools.cache
def _headers() -> str:
    headers = sorted(Path(__file__).parent.glob("*.h"))
    return "".join(_COMMENT.sub("", header.read_text()) for header in headers)


@functools.cache
def _bodies() -> dict[str, str]:
    """Return the members of each struct in the headers."""
    return {name: body for body, name in _STRUCT.findall(_headers())}


@functools.cache
def constants(name: str) -> Any:
    """Return the IntEnum of a C enum whose members count up from 0."""
    members = dict(_ENUM.findall(_headers()))[name].replace(" ", "").split(",")
    return enum.IntEnum(name, members, start=0)


@functools.cache
def struct(name: str) -> Any:
    """Return the ctypes class of a C struct. A pointer to constant structs is a POINTER; any
    other pointer is an address."""
    members: list[tuple[str, Any]] = []
    for declaration in filter(None, map(str.strip, _bodies()[name].split(";"))):
        is_constant = declaration.startswith("const ")
        kind, names = declaration.replace("const ", "").split(maxsplit=1)
        for member in names.split(","):
            members.append((member.strip(" *"), _type(kind, "*" in member, is_constant)))
    return type(name, (ctypes.Structure,), {"_fields_": members})


def _type(kind: str, is_pointer: bool, is_constant: bool) -> Any:
    if kind in _bodies() and (is_constant or not is_pointer):
        return POINTER(struct(kind)) if is_pointer else struct(kind)
    return c_void_p if is_pointer else _NUMBERS[kind]
