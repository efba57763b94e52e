"""`cbatch chat`: talk with a model in the terminal, or over a pipe with one message per line."""

from __future__ import annotations

import argparse
import io
import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from msgspec.structs import replace
from rich.console import Console

from cbatch.cli.console import TextConsole
from cbatch.cli.get import offer_model
from cbatch.cli.options import (
    ChatTemplateFile,
    ModelSettings,
    ReasoningFormat,
    add_engine_flags,
    model_paths,
)
from cbatch.cli.output import FAILED
from cbatch.cli.settings import add_flags, fields_of, read_settings
from cbatch.core.request.errors import FieldError, InputError, did_you_mean
from cbatch.core.request.request import FinishReason, SamplingParams
from cbatch.core.request.typed import knob, require_text
from cbatch.engine.build import load_engine
from cbatch.engine.engine import Engine
from cbatch.engine.model_files import chat_template_of
from cbatch.system.terminal import shown
from cbatch.text.chat_format import ChatFormat
from cbatch.text.gguf_tokenizer import GEMMA_TURNS
from cbatch.text.outputs import Choice
from cbatch.text.reply_formats import ReplyFormat
from cbatch.text.reply_reader import Done, Part, ReplyReader, Thought, read_reply
from cbatch.text.tool_parsers import mark_ids

with suppress(ImportError):
    import readline  # noqa: F401 - `input` edits lines and keeps their history

EPILOG = """\
/help lists the commands of a conversation. Ctrl-C stops an answer, Ctrl-D leaves. Without a
terminal each line of standard input is a message or a command, standard output has the answers
alone, and the exit status is 2 if a line was invalid.
"""
_chat = partial(knob, "chat")


class ChatSettings(ModelSettings, frozen=True, kw_only=True):
    system: Annotated[str | None, _chat("system message", "TEXT")] = None
    show_drafts: Annotated[
        bool, _chat("colour the tokens that are accepted drafts, and print their share")
    ] = False
    chat_template: ChatTemplateFile = None
    reasoning_parser: ReasoningFormat = "auto"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "chat",
        usage="%(prog)s [MODEL] [options]",
        description="Talk with a model in the terminal.",
        epilog=EPILOG,
    )
    add_flags(parser, SamplingParams, only=SAMPLING_FIELDS, defaults=_DEFAULTS)
    add_engine_flags(parser, ChatSettings)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    settings = read_settings(ChatSettings, args)
    read_settings(SamplingParams, args)  # reports invalid flags before the model is loaded
    values = settings.values
    model, draft = model_paths(values.model, values.draft)
    for name in (model, draft):
        offer_model(name)
    notes = TextConsole(stderr=True, soft_wrap=True)
    with settings.naming():
        template = chat_template_of(model, values.chat_template)
        if template is None:
            remedy = "give --chat-template, or use cbatch generate"
            raise FieldError("model", f"{model} has no chat template", remedy)
        if values.engine.tokenizer == "none":
            raise FieldError("tokenizer", "'none' cannot read or write text", "leave it out")
        engine, info = load_engine(model, draft, values.engine)
        if values.show_drafts and not info.drafter:
            problem = "has nothing to show, since nothing drafts"
            remedy = "give --draft MODEL or --drafter ngram"
            if not values.engine.may_draft:
                remedy = "leave out --lookahead off"
            raise FieldError("show_drafts", problem, remedy)
    notes.print("\n".join(info.lines()), style="dim")
    if template.text == GEMMA_TURNS:
        notes.print("no chat template: a base model, made to continue texts", style="dim")
    defaults = {"max_tokens": info.max_model_len, **(info.sampling_defaults or _SAMPLING)}
    session = ChatSession(
        engine,
        ChatFormat(
            str(model),
            max_model_len=info.max_model_len,
            tokenizer=engine.tokenizer,
            chat_template=template,
            reasoning_parser=values.reasoning_parser,
        ),
        read_settings(SamplingParams, args, defaults=defaults).values,
        notes,
        values.system,
        values.show_drafts,
    )
    return _talk(session, notes)


def _talk(session: ChatSession, notes: TextConsole) -> int:
    """Run lines of standard input until it ends. Returns the exit status."""
    terminal, num_errors = sys.stdin.isatty(), 0
    prompt = "> " if terminal and sys.stdout.isatty() else ""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if prompt:
        notes.print("/help lists commands; Ctrl-C stops an answer, Ctrl-D leaves", style="dim")
    while True:
        try:
            line = input(prompt)
        except EOFError:
            break
        except KeyboardInterrupt:
            if not terminal:
                raise
            notes.print("\nCtrl-D or /exit leaves", style="dim")
            continue
        try:
            if not line.startswith("/"):
                session.say(line.strip())
            elif not session.command(line):
                break
        except InputError as error:
            notes.print(str(error), style="red")
            num_errors += 1
        except KeyboardInterrupt:
            if not (terminal and line.startswith("/")):
                raise
            notes.print("stopped", style="dim")  # such as /save to a pipe without a reader
    if prompt:
        print()
    return FAILED if num_errors and not terminal else 0


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
# Without advice in a model's files: at temperature 1 small models wander into other languages.
_SAMPLING = {"temperature": 0.7, "top_p": 0.9}
_DEFAULTS = {"max_tokens": "the context"} | {
    k: f"the model's, else {v}" for k, v in _SAMPLING.items()
}
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
