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

TEMPLATE_FILE = "chat_template.jinja"  # the default one
TEMPLATE_FOLDER = "additional_chat_templates"  # of the others, by name
DEFAULT, TOOL_USE = "default", "tool_use"
CONFIG_FILE = "tokenizer_config.json"
# Names in a tokenizer's configuration that templates use.
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
RESERVED = ("messages", "tools", "add_generation_prompt", *SPECIAL_TOKENS)

_MOST_CHARS = 1 << 18  # of a template: compiling one takes time by its length

Message = Mapping[str, Any]

# Replacements of roles that a template does not know.
_OTHER_ROLE = {"developer": "system", "function": "tool"}
_NULL_CONTENT = re.compile(r"""content['"]?\]?\)?\s*(?:is\s+(?:not\s+)?|[!=]=\s*)[nN]one""")


class CallArguments(dict[str, Any]):
    """The arguments of an earlier tool call: an object that prints as the text the client sent."""

    def __init__(self, fields: Mapping[str, Any], text: str) -> None:
        super().__init__(fields)
        self.text = text  # templates cannot read it, so it hides no argument

    def __str__(self) -> str:
        return self.text


class ChatTemplateError(ValueError):
    """A broken template, or a conversation that it cannot render. `refused`: the template itself
    rejects the conversation by `raise_exception`."""

    def __init__(self, problem: str, *, refused: bool = False) -> None:
        super().__init__(problem)
        self.refused = refused


class ChatTemplate:
    """A Jinja template in a sandbox: it sees the conversation and may change nothing.

    `special_tokens` are texts by the name templates use, such as `bos_token`. `tool_use` replaces
    this template for calls with tools. Raises `ChatTemplateError` where the text does not parse.
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
        if len(text) > _MOST_CHARS:
            problem = f"has {len(text)} characters, {_MOST_CHARS} may be"
            raise ChatTemplateError(f"chat template: {source} {problem}; name another")
        try:
            self._template = _environment().from_string(text)
        except Exception as error:  # also of Python, which it becomes: nested too deeply, say
            raise ChatTemplateError(f"chat template: {source} does not parse ({error})") from error

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which parses the text again."""
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
        """Return the conversation as text, special tokens included. `variables` are the template's
        own (say `enable_thinking`). Raises `ChatTemplateError`, also where the template would drop
        messages of a role that it does not know."""
        given = {
            "documents": None,
            **self._special_tokens,
            **(variables or {}),
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "add_generation_prompt": add_generation_prompt,
        }
        chosen = (self._tool_use if tools else None) or self
        return chosen._render(messages, given)

    def _render(self, messages: Sequence[Message], given: Mapping[str, Any]) -> str:
        """Render with the first form of earlier calls that the template accepts. DeepSeek's accept
        only arguments as text, Mistral's only ids of nine letters and digits, and some tell calls
        by null content."""
        no_content = (True, False) if _NULL_CONTENT.search(self.text) else (False,)
        ways = itertools.product((False, True), (False, True), no_content)
        errors: list[Exception] = []
        for short_ids, as_text, null in ways:
            try:
                fitted = [self._fitted(each, short_ids, as_text, null) for each in messages]
                text = self._template.render(given, messages=fitted)
            except MemoryError:
                raise
            except Exception as error:  # what a template does with a message may fail in any way
                errors.append(error)
                if "tool_call" in str(messages):
                    continue
                break  # all forms are the same
            for role in dict.fromkeys(message["role"] for message in messages):
                both = zip(messages, fitted, strict=True)
                rest = [after for before, after in both if before["role"] != role]
                lost = not self._knows(role) and self._renders(rest, given, text)
                if lost and not self._renders([], given, text):  # it prints other messages
                    problem = f"it drops messages of the role {role!r}"
                    raise ChatTemplateError(problem, refused=True)
            return text
        refusals = [each for each in errors if type(each) is TemplateError]  # not a derived class
        first = (refusals or errors)[0]
        problem = str(first) or type(first).__name__
        raise ChatTemplateError(problem, refused=bool(refusals)) from first

    def _renders(self, messages: Sequence[Message], given: Mapping[str, Any], text: str) -> bool:
        with suppress(Exception):
            return self._template.render(given, messages=messages) == text
        return False

    def _knows(self, role: str) -> bool:
        """Return whether the template tests for the role. The three common roles always pass."""
        asked = rf"""role[^%}}]{{0,200}}['"]{re.escape(role)}['"]"""
        return role in ("system", "user", "assistant") or re.search(asked, self.text) is not None

    def _fitted(
        self, message: Message, short_ids: bool, as_text: bool, null: bool
    ) -> dict[str, Any]:
        """Return a copy with the roles, ids, arguments and content that the template accepts."""
        fitted, role = dict(message), message["role"]
        if role in _OTHER_ROLE and not self._knows(role):
            fitted["role"] = _OTHER_ROLE[role]
        if role == "assistant" and not message.get("content"):
            fitted["content"] = None if null and message.get("tool_calls") else ""
        if short_ids and "tool_call_id" in message:
            fitted["tool_call_id"] = _short_id(message["tool_call_id"])
        if calls := [dict(call) for call in message.get("tool_calls") or ()]:
            fitted["tool_calls"] = calls
        for call in calls:
            if short_ids and "id" in call:
                call["id"] = _short_id(call["id"])
            if as_text:
                arguments = str(call["function"]["arguments"])
                call["function"] = {**call["function"], "arguments": arguments}
        return fitted


def _short_id(call_id: Any) -> str:
    if re.fullmatch("[a-zA-Z0-9]{9}", str(call_id)):
        return str(call_id)
    return hashlib.sha256(str(call_id).encode()).hexdigest()[:9]


def load_chat_template(
    model: str | Path, file: str | Path | None = None, config: Mapping[str, Any] | None = None
) -> ChatTemplate | None:
    """Load a model's template: `file` if given, else its `default` and `tool_use` templates.

    `file` may also be the name of one of the model's templates. These are `chat_template.jinja`,
    `additional_chat_templates/NAME.jinja`, and those in `tokenizer_config.json`, which `config`
    replaces. Returns None where there is no default. Raises `ChatTemplateError`.
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


def _named(found: Any) -> dict[str, str]:
    """Return templates by name from a configuration with one text, a list or an object."""
    if isinstance(found, list):
        entries = [each for each in found if isinstance(each, dict)]
        found = {str(each.get("name")): each.get("template") for each in entries}
    named = found if isinstance(found, dict) else {DEFAULT: found}
    return {name: text for name, text in named.items() if isinstance(text, str)}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ChatTemplateError(f"chat template: {path} cannot be read ({error})") from error


def _read_config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ChatTemplateError(f"chat template: {path} cannot be read ({error})") from error
    return found if isinstance(found, dict) else {}


def _token_text(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value)


def _find(model: str | Path, name: str) -> Path | None:
    folder = Path(model)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    if folder.exists():
        return None  # a tokenizer's file: nothing lies beside it by right
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(str(model), name))
    except Exception:  # the hub has none, or cannot be reached; the model itself says which
        return None


class _Generation(Extension):
    """`{% generation %}` marks what a model wrote, for training; here it is what it encloses."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    """With what templates of published models rely on."""
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
    """Replace Jinja's own filter, which escapes `<` and `>` for web pages."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise TemplateError(message)
