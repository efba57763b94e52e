"""`cbatch chat`: talk with a model in the terminal, or over a pipe with one message per line."""

from __future__ import annotations

import argparse
import io
import sys
from contextlib import suppress
from functools import partial
from typing import Annotated

from cbatch.cli.chat_session import SAMPLING_FIELDS, ChatSession
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
from cbatch.cli.settings import add_flags, read_settings
from cbatch.core.request.errors import FieldError, InputError
from cbatch.core.request.request import SamplingParams
from cbatch.core.request.typed import knob
from cbatch.engine.build import load_engine
from cbatch.engine.model_files import chat_template_of
from cbatch.text.chat_format import ChatFormat

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
    add_flags(parser, SamplingParams, only=SAMPLING_FIELDS, defaults={"max_tokens": "the context"})
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
            raise FieldError("show_drafts", problem, "give --draft MODEL or --drafter ngram")
    notes.print("\n".join(info.lines()), style="dim")
    defaults = {"max_tokens": info.max_model_len, **info.sampling_defaults}
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
