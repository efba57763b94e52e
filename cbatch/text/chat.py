"""Chat templates: render conversations as the text that a model was trained on.

A model may have several named templates: `default`, and `tool_use` for calls with tools.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cbatch.core.request.errors import InputError
from cbatch.text.instructions import (
    Message,
    arrangements,
    is_instruction,
    keeps_instructions,
    plainly_keeps,
)

TEMPLATE_FILE = "chat_template.jinja"  # the default template
TEMPLATE_FOLDER = "additional_chat_templates"  # the others, by name
DEFAULT, TOOL_USE = "default", "tool_use"
CONFIG_FILE = "tokenizer_config.json"
# Special tokens in a tokenizer's configuration that templates refer to, by name.
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt", *SPECIAL_TOKENS)

_MAX_CHARS = 1 << 18  # length limit of a template: compiling time grows with length

Form = tuple[bool, bool, bool]  # arguments of `_adapted`
# Replacements for roles that a template does not support.
_OTHER_ROLE = {"developer": "system", "function": "tool"}
_NULL_CONTENT = re.compile(r"""content['"]?\]?\)?\s*(?:is\s+(?:not\s+)?|[!=]=\s*)[nN]one""")


class CallArguments(dict[str, Any]):
    """Parsed arguments of a tool call in a conversation. `str` returns the text from the client."""

    def __init__(self, fields: Mapping[str, Any], text: str) -> None:
        super().__init__(fields)
        self._text = text  # private: Jinja reads `arguments.text` as the argument of that name

    def __str__(self) -> str:
        return self._text


class ChatTemplateError(InputError):
    """A broken template, or a conversation that it cannot render. `refused` is true if the template
    rejects the conversation by `raise_exception`, or drops some of its messages."""

    def __init__(self, problem: str, *, refused: bool = False) -> None:
        super().__init__(problem)
        self.refused = refused


class ChatTemplate:
    """A chat template, rendered in Jinja's sandbox.

    `special_tokens` maps the template's names, such as `bos_token`, to texts. `tool_use` replaces
    this template for requests with tools. Raises `ChatTemplateError` for a text that is too long or
    does not parse.
    """

    def __init__(
        self,
        text: str,
        special_tokens: Mapping[str, str],
        source: str,
        tool_use: ChatTemplate | None = None,
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self.text, self._tool_use = text, tool_use
        if len(text) > _MAX_CHARS:
            problem = f"has {len(text)} characters, at most {_MAX_CHARS} are allowed"
            raise ChatTemplateError(f"chat template: {source} {problem}; name another")
        try:
            self._template = _environment().from_string(text)
        except Exception as error:  # also errors of Python's compiler, as for deep nesting
            raise ChatTemplateError(f"chat template: {source} does not parse ({error})") from error

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without the parsed template; `__setstate__` parses again."""
        return {name: value for name, value in vars(self).items() if name != "_template"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _template=_environment().from_string(state["text"]))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the conversation as text, with special tokens. `variables` are other variables of
        the template, such as `enable_thinking`. Raises `ChatTemplateError`, also if the template
        would silently drop messages of a role that it does not know."""
        values = {
            "documents": None,
            **self._special_tokens,
            **(variables or {}),
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "add_generation_prompt": add_generation_prompt,
        }
        chosen = (self._tool_use if tools else None) or self
        return chosen._render(messages, values)

    def _render(self, messages: Sequence[Message], values: Mapping[str, Any]) -> str:
        """Render the conversation with its system and developer messages where the template keeps
        their text."""
        if not (isinstance(messages, Sequence) and any(map(is_instruction, messages))):
            return self._in_some_form(messages, values)[0]
        errors: list[ChatTemplateError] = []
        for arranged, tests in arrangements(list(messages)):
            try:
                text, form = self._in_some_form(arranged, values)
            except ChatTemplateError as error:
                errors.append(error)
                continue
            if plainly_keeps(messages, text) or all(self._keeps(t, form, values) for t in tests):
                return text
        raise (errors or [ChatTemplateError("it drops system messages", refused=True)])[0]

    def _in_some_form(
        self, messages: Sequence[Message], values: Mapping[str, Any]
    ) -> tuple[str, Form]:
        """Render the conversation, with its tool calls in the first form that the template accepts.
        DeepSeek's templates accept only text arguments, Mistral's only ids of nine letters and
        digits. Some templates recognise a tool call by null content."""
        no_content = (True, False) if _NULL_CONTENT.search(self.text) else (False,)
        errors: list[Exception] = []
        for form in itertools.product((False, True), (False, True), no_content):
            try:
                adapted = [self._adapted(m, *form) for m in messages]
                text = self._template.render(values, messages=adapted)
            except MemoryError:
                raise
            except Exception as error:  # a template may fail in any way on a message
                errors.append(error)
                if "tool_call" in str(messages):
                    continue
                break  # without tool calls all forms are the same
            for role in dict.fromkeys(message["role"] for message in messages):
                both = zip(messages, adapted, strict=True)
                others = [after for before, after in both if before["role"] != role]
                drops = not self._knows(role) and self._renders_as(others, values, text)
                if drops and not self._renders_as([], values, text):  # the text has messages
                    problem = f"it drops messages of the role {role!r}"
                    raise ChatTemplateError(problem, refused=True)
            return text, form
        refusals = [
            error for error in errors if type(error) is TemplateError
        ]  # by `raise_exception`
        first = (refusals or errors)[0]
        problem = str(first) or type(first).__name__
        raise ChatTemplateError(problem, refused=bool(refusals)) from first

    def _keeps(self, marked: Sequence[Message], form: Form, values: Mapping[str, Any]) -> bool:
        with suppress(Exception):
            adapted = [self._adapted(message, *form) for message in marked]
            return keeps_instructions(marked, self._template.render(values, messages=adapted))
        return False

    def _renders_as(
        self, messages: Sequence[Message], values: Mapping[str, Any], text: str
    ) -> bool:
        with suppress(Exception):
            return self._template.render(values, messages=messages) == text
        return False

    def _knows(self, role: str) -> bool:
        """Return whether the template tests for the role. Three common roles are always known."""
        comparison = rf"""role[^%}}]{{0,200}}['"]{re.escape(role)}['"]"""
        return (
            role in ("system", "user", "assistant") or re.search(comparison, self.text) is not None
        )

    def _adapted(
        self, message: Message, short_ids: bool, as_text: bool, null_content: bool
    ) -> dict[str, Any]:
        """Return a copy of the message with role, ids, arguments and content in the chosen form."""
        adapted, role = dict(message), message["role"]
        if role in _OTHER_ROLE and not self._knows(role):
            adapted["role"] = _OTHER_ROLE[role]
        if role == "assistant" and not message.get("content"):
            adapted["content"] = None if null_content and message.get("tool_calls") else ""
        if short_ids and "tool_call_id" in message:
            adapted["tool_call_id"] = _short_id(message["tool_call_id"])
        if calls := [dict(call) for call in message.get("tool_calls") or ()]:
            adapted["tool_calls"] = calls
        for call in calls:
            if short_ids and "id" in call:
                call["id"] = _short_id(call["id"])
            if as_text:
                arguments = str(call["function"]["arguments"])
                call["function"] = {**call["function"], "arguments": arguments}
        return adapted


def _short_id(call_id: Any) -> str:
    if re.fullmatch("[a-zA-Z0-9]{9}", str(call_id)):
        return str(call_id)
    return hashlib.sha256(str(call_id).encode()).hexdigest()[:9]


def load_chat_template(
    model: str | Path, file: str | Path | None = None, config: Mapping[str, Any] | None = None
) -> ChatTemplate | None:
    """Load a model's template: `file` if given, else its `default` and `tool_use` templates.

    `file` may also be the name of one of the model's templates. These are `chat_template.jinja`,
    `additional_chat_templates/NAME.jinja`, and the templates in `tokenizer_config.json`. If
    `config` is given, it replaces these files. Returns None if the model has no default template.
    Raises `ChatTemplateError`.
    """
    names = [DEFAULT, TOOL_USE] if file is None else [] if os.path.exists(file) else [str(file)]
    files: dict[str, Path | None] = {}
    config_path: Path | None = Path(model)
    if config is None:
        files = {name: _find(model, f"{TEMPLATE_FOLDER}/{name}.jinja") for name in names}
        if DEFAULT in names:
            files[DEFAULT] = _find(model, TEMPLATE_FILE)
        config_path = _find(model, CONFIG_FILE)
        config = {} if config_path is None else _read_config(config_path)
    tokens = {name: _token_text(config[name]) for name in SPECIAL_TOKENS if config.get(name)}

    def load(name: str, tool_use: ChatTemplate | None = None) -> ChatTemplate | None:
        path = files.get(name)
        if path is not None:
            return ChatTemplate(_read(path), tokens, str(path), tool_use)
        text = None if files.get(DEFAULT) else _named(config.get("chat_template")).get(name)
        return None if text is None else ChatTemplate(text, tokens, str(config_path), tool_use)

    if file is None:
        return load(DEFAULT, load(TOOL_USE))
    named = load(str(file)) if names else None
    return named or ChatTemplate(_read(Path(file)), tokens, str(file))


def _named(setting: Any) -> dict[str, str]:
    if isinstance(setting, list):
        entries = [entry for entry in setting if isinstance(entry, dict)]
        setting = {str(entry.get("name")): entry.get("template") for entry in entries}
    named = setting if isinstance(setting, dict) else {DEFAULT: setting}
    return {name: text for name, text in named.items() if isinstance(text, str)}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ChatTemplateError(f"chat template: {path} cannot be read ({error})") from error


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ChatTemplateError(f"chat template: {path} cannot be read ({error})") from error
    return config if isinstance(config, dict) else {}


def _token_text(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value)


def _find(model: str | Path, name: str) -> Path | None:
    folder = Path(model)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    if folder.exists():
        return None  # `model` is a tokenizer file; other files in its folder need not belong to it
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(str(model), name))
    except Exception:  # no such file, or the hub is unreachable; loading the model reports that
        return None


class _Generation(Extension):
    """`{% generation %}` marks the model's own text for training. Its content is rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replace Jinja's own filter, which escapes `<` and `>` for HTML."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise TemplateError(message)
