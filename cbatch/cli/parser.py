"""Argument parser of all commands. It takes no abbreviations. Its errors show the usage of the
subcommand that was typed, and suggest a known option or choice."""

from __future__ import annotations

import argparse
from argparse import SUPPRESS
from typing import Any

from cbatch.core.request.errors import did_you_mean
from cbatch.core.request.numbers import number_problem


class CommandParser(argparse.ArgumentParser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Reject unknown arguments in the subcommand's parser. argparse would leave them to the
        main parser, whose usage message does not show the subcommand's options."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [each.partition("=")[0] for each in unknown if each.startswith("-")]
            hint = self._meant(options[0]) if options else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return namespace, unknown

    def _meant(self, option: str) -> str:
        known = self._option_string_actions
        longer = [
            name for name in known if name.startswith(option) and known[name].help != SUPPRESS
        ]
        return f"; did you mean {longer[0]}?" if longer else did_you_mean(option, known)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Return the option of a letter that its value follows, as in `-pTEXT`, and none for an
        abbreviation, which a new option would make ambiguous."""
        matches = super()._get_option_tuples(option_string)
        return [each for each in matches if each[1] == option_string[:2]]

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        value = super()._get_value(action, text)
        if type(value) in (int, float) and (problem := number_problem(value)):
            raise argparse.ArgumentError(action, f"{text!r} is not allowed: {problem}")
        return value

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += did_you_mean(str(value), map(str, action.choices or ()))
            raise
