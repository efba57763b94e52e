"""Helpers for ctypes structs."""

from __future__ import annotations


def fields(kind: type, names: str) -> list[tuple[str, type]]:
    """Return fields of one type with these names, in order."""
    return [(name, kind) for name in names.split()]
