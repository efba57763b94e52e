"""The parser of every command: its errors show the usage of the command that was typed, and what
may have been meant."""

from __future__ import annotations

import argparse
from typing import Any

from cbatch.core.request.errors import did_you_mean


class CommandParser(argparse.ArgumentParser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Take nothing that is unknown: argparse would leave it to the parser of all commands,
        whose usage says nothing about this one."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [each for each in unknown if each.startswith("-")]
            known = self._option_string_actions
            meant = did_you_mean(options[0].partition("=")[0], known) if options else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return namespace, unknown

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Complete an abbreviation to a name that help shows, where one fits."""
        matches = super()._get_option_tuples(option_string)
        return [each for each in matches if each[0].help != argparse.SUPPRESS] or matches

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += did_you_mean(str(value), map(str, action.choices or ()))
            raise
