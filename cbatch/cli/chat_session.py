"""A conversation in the terminal: its messages, its commands, and answers as they are generated."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from rich.console import Console

from cbatch.cli.console import TextConsole
from cbatch.cli.settings import fields_of
from cbatch.core.request.errors import FieldError, InputError, did_you_mean
from cbatch.core.request.request import FinishReason, SamplingParams
from cbatch.core.request.typed import require_text
from cbatch.engine.engine import Engine
from cbatch.system.terminal import shown
from cbatch.text.chat_format import ChatFormat
from cbatch.text.outputs import Choice
from cbatch.text.reply_reader import Done, Part, ReplyFormat, ReplyReader, Thought, read_reply
from cbatch.text.tool_parsers import mark_ids

COMMANDS = {  # arguments and help
    "set": ("[NAME VALUE]", "set a sampling parameter; alone: show all"),
    "system": ("[TEXT]", "set the system message; alone: remove it"),
    "save": ("FILE", "write the conversation as JSON; FILE.jsonl: one message per line"),
    "clear": ("", "forget the conversation, but not the system message"),
    "help": ("", "show this list"),
    "exit": ("", "leave, as Ctrl-D does"),
}
# Settings by name. Those left out are for answers that no conversation shows.
SAMPLING_FIELDS = {
    name: setting
    for name, setting in fields_of(SamplingParams).items()
    if name not in ("n", "logprobs", "logprobs_mode", "prompt_logprobs")
}
_BY_ALIAS = {alias: each for each in SAMPLING_FIELDS.values() for alias in each.names}
_ACCEPTED, _THOUGHT = "#4dbbaa", "dim"  # styles; the first is the live page's colour
_NOTES = {
    FinishReason.CANCELLED: "stopped",
    FinishReason.LENGTH: "the answer is as long as max_tokens or the context allows",
}


@dataclass
class ChatSession:
    """A conversation with the model in `engine`. Answers go to standard output, all else to
    `notes`. `say` and `command` raise `InputError`, and then change nothing."""

    engine: Engine
    chat_format: ChatFormat
    params: SamplingParams
    notes: Console
    system: str | None = None
    show_drafts: bool = False

    def __post_init__(self) -> None:
        thoughts = self.chat_format.thoughts
        self._reply = ReplyFormat(thoughts=thoughts, separate=thoughts is not None)
        self._mark_ids = mark_ids(self._reply, self.chat_format.tokenizer)
        self._turns: list[dict[str, str]] = []
        self._console = TextConsole()

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation in the form of OpenAI's API."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self._turns]

    def say(self, text: str) -> None:
        """Send a message, and stream the answer. An empty answer, and its message, are dropped."""
        if not text:
            return
        message = {"role": "user", "content": text}
        messages = [*self.messages, message]
        require_text("messages", messages)
        ids = self.chat_format.prompt_ids(messages)
        params = self.chat_format.constrain(self.params, ids)
        request = self.engine.add(ids, params, mark_ids=self._mark_ids)
        parts, choice = self._stream(request.request_id, self.chat_format.prompt_end(ids))
        if choice.error:
            raise InputError(choice.error)
        answer = {"role": "assistant", "content": "".join(p for p in parts if type(p) is str)}
        if thought := "".join(part for part in parts if isinstance(part, Thought)):
            answer["reasoning"] = thought
        if parts:
            self._turns += message, answer
        if choice.finish_reason in _NOTES:
            self.notes.print(_NOTES[choice.finish_reason], style="dim")
        if self.show_drafts:
            self.notes.print(_share(choice), style="dim")

    def command(self, line: str) -> bool:
        """Run a line such as `/set temperature 0`. Returns False if it says to leave."""
        name, _, argument = line[1:].partition(" ")
        argument = argument.strip()
        if name not in COMMANDS:
            problem = f"is not a command{did_you_mean(name, COMMANDS)}"
            raise FieldError(f"/{name}", problem, "type /help, or a space before a message")
        usage = COMMANDS[name][0]
        if bool(argument) and not usage or usage == "FILE" and not argument:
            raise FieldError(f"/{name}", f"{argument!r} is not allowed", f"write /{name} {usage}")
        match name:
            case "set":
                self._set(argument)
            case "system":
                self.system = argument or None
            case "save":
                self._save(argument)
            case "clear":
                self._turns.clear()
            case "help":
                for command, (usage, text) in COMMANDS.items():
                    self.notes.print(f"{f'/{command} {usage}':<20} {text}")
        return name != "exit"

    def _set(self, argument: str) -> None:
        name, _, value = argument.partition(" ")
        if not name:
            for setting in SAMPLING_FIELDS.values():
                value = getattr(self.params, setting.field)
                self.notes.print(f"{setting.name} {value}")
            return
        given = name.lstrip("-").replace("-", "_")
        if given not in _BY_ALIAS:
            problem = f"is not a sampling parameter{did_you_mean(given, _BY_ALIAS)}"
            raise FieldError(name, problem, f"use {', '.join(SAMPLING_FIELDS)}")
        if not value.strip():
            raise FieldError(name, "has no value", f"write /set {name} VALUE")
        setting = _BY_ALIAS[given]
        raw = [value.strip()] if setting.repeats else value.strip()
        converted = setting.convert(raw, name, strict=False)
        self.params = replace(self.params, **{setting.field: converted})

    def _save(self, file: str) -> None:
        if file.endswith(".jsonl"):
            text = "\n".join(json.dumps(each, ensure_ascii=False) for each in self.messages)
        else:
            text = json.dumps(self.messages, ensure_ascii=False, indent=2)
        try:
            Path(file).expanduser().write_text(text + "\n", encoding="utf-8")
        except (OSError, RuntimeError, ValueError) as error:  # such as a NUL, or no such user
            problem = f"{file} cannot be written ({getattr(error, 'strerror', error)})"
            raise FieldError("/save", problem, "name a file in a folder that exists") from error

    def _stream(self, request_id: str, prompt_end: str) -> tuple[list[Part], Choice]:
        """Show the answer as it is generated, until it ends or Ctrl-C stops it."""
        reader, parts = ReplyReader(self._reply, prompt_end), list[Part]()
        with _stop_on_interrupt() as stopped:
            while True:
                for output in self.engine.step():
                    for part, is_draft in read_reply(output, reader):
                        if isinstance(part, Done):
                            break
                        self._show(part, is_draft, previous=parts[-1] if parts else None)
                        parts.append(part)
                    self._console.file.flush()
                    if output.finished is not None:
                        self._console.file.write("\n")
                        return parts, output.finished
                if stopped.is_set():
                    self.engine.cancel(request_id)  # the next step returns its last output

    def _show(self, part: Part, is_draft: bool, previous: Part | None) -> None:
        """Write a part of the answer, which follows `previous`."""
        thought = isinstance(part, Thought)
        styles = [_THOUGHT] * thought + [_ACCEPTED] * (is_draft and self.show_drafts)
        if isinstance(previous, Thought) and not thought:
            self._console.file.write("\n\n")
        text = shown(str(part), self._console.file)
        if styles:
            self._console.out(text, style=" ".join(styles), end="")
        else:
            self._console.file.write(text)


def _share(choice: Choice) -> str:
    drafts, num_tokens = choice.speculation, len(choice.token_ids)
    if not drafts.drafted_tokens:
        return f"none of {num_tokens} tokens was drafted"
    accepted = drafts.accepted_tokens
    return (
        f"{accepted} of {num_tokens} tokens are accepted drafts ({accepted / num_tokens:.0%}); "
        f"{accepted / drafts.drafted_tokens:.0%} of drafts accepted"
    )


@contextmanager
def _stop_on_interrupt() -> Iterator[threading.Event]:
    """Context manager that sets the event at Ctrl-C. A second Ctrl-C raises KeyboardInterrupt."""
    stopped = threading.Event()

    def stop(*_: Any) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)
