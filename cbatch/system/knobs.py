"""The mark of settings: fields of a struct that an operator may set. `cbatch.cli.settings` makes a
flag, an environment variable and a key of a TOML file of each."""

from __future__ import annotations

from typing import Any

from msgspec import Meta


def knob(group: str, text: str, metavar: str | None = None, **more: Any) -> Meta:
    """Annotate a field as a setting: `group` of its flag, `text` for the help. `more` says how the
    setting differs from the field: `name`, `type`, `unit` (in units of the field), `negated`."""
    return Meta(description=text, extra={"group": group, "metavar": metavar, **more})
