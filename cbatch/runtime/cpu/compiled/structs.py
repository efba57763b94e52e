"""Structs of the kernels, as ctypes declares them."""

from __future__ import annotations


def fields(kind: type, names: str) -> list[tuple[str, type]]:
    """Of one type, one after another."""
    return [(name, kind) for name in names.split()]
