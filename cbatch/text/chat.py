"""Chat templates: conversations to the text that a model was trained on, by its own files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
# Names in a tokenizer's configuration that templates use.
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
RESERVED = ("messages", "tools", "add_generation_prompt", *SPECIAL_TOKENS)

_MOST_CHARS = 1 << 18  # of a template: compiling one takes time by its length

Message = Mapping[str, Any]


class ChatTemplateError(ValueError):
    """A template that is broken, or a conversation that it refuses; says why."""


class ChatTemplate:
    """A Jinja template in a sandbox: it sees the conversation and may change nothing.

    `special_tokens` are texts by the name templates use, such as `bos_token`. Raises
    `ChatTemplateError` where the template does not parse.
    """

    def __init__(self, text: str, special_tokens: Mapping[str, str], source: str) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        if len(text) > _MOST_CHARS:
            problem = f"has {len(text)} characters, {_MOST_CHARS} may be"
            raise ChatTemplateError(f"chat template: {source} {problem}; name another")
        try:
            self._template = _environment().from_string(text)
        except Exception as error:  # also of Python, which it becomes: nested too deeply, say
            raise ChatTemplateError(f"chat template: {source} does not parse ({error})") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text, special tokens included. `variables` are the template's own
        (say `enable_thinking`). Raises `ChatTemplateError`."""
        given = {**self._special_tokens, **(variables or {})}
        try:
            return self._template.render(
                given,
                messages=[dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # what a template does with a message may fail in any way
            raise ChatTemplateError(str(error) or type(error).__name__) from error


def load_chat_template(
    model: str | Path, file: str | Path | None = None, config: Mapping[str, Any] | None = None
) -> ChatTemplate | None:
    """The template of a model: `file` if given, else `chat_template.jinja` beside the model, else
    the one in its `tokenizer_config.json`, which `config` stands in for. None where there is none.
    Raises `ChatTemplateError`."""
    config_path = _find(model, CONFIG_FILE) if config is None else Path(model)
    if config is None:
        config = {} if config_path is None else _read_config(config_path)
    tokens = {name: _token_text(config[name]) for name in SPECIAL_TOKENS if config.get(name)}
    path = Path(file) if file is not None else _find(model, TEMPLATE_FILE)
    if path is not None:
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), tokens, str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ChatTemplateError(f"chat template: {path} cannot be read ({error})") from error
    text = _default(config.get("chat_template"))
    return None if text is None else ChatTemplate(text, tokens, str(config_path))


def _default(found: Any) -> str | None:
    """Older files hold one template, or a list of named ones."""
    if isinstance(found, list):
        templates = [each for each in found if isinstance(each, dict)]
        named = {str(each.get("name")): each.get("template") for each in templates}
        found = named.get("default")
    return found if isinstance(found, str) else None


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
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    """Jinja's own escapes `<` and `>` for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> None:
    raise TemplateError(message)
