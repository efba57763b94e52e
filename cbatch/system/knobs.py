"""What an operator may set: a mark on the one field that it sets. Commands make of it a flag, a
variable of the environment and a key of a TOML file, see `cbatch.cli.settings`."""

from __future__ import annotations

from typing import Any

from msgspec import Meta


def knob(group: str, text: str, metavar: str | None = None, **more: Any) -> Meta:
    """Of a field: the group of its flag, and what the help says. More, where the setting differs
    from its field: `name`, `type`, in what `unit`s of the field it is, whether it is `negated`."""
    return Meta(description=text, extra={"group": group, "metavar": metavar, **more})
