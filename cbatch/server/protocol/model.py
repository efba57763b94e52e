"""The served model: its name, limits, templates and formats, and how its text becomes token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import SamplingParams
from cbatch.server.protocol.errors import UnknownModelError
from cbatch.text import ChatTemplate, ChatTemplateError, TextTokenizer
from cbatch.text.output_processor import require_length, token_texts
from cbatch.text.thought_grammar import around_answer
from cbatch.text.tool_parsers import (
    THOUGHTS,
    ReasoningParser,
    ToolParser,
    find_reasoning_parser,
)

_PROMPT_END_TOKENS = 32  # last tokens of a prompt that are searched for marks


class ServedModel:
    """The model as clients see it. `root` is its path or hub name, `created_s` seconds since the
    epoch. `tool_parser` names the format of its tool calls, None if unknown; `reasoning_parser` the
    format of its thoughts. `sampling_defaults` are the model's defaults for `SamplingParams`."""

    def __init__(
        self,
        name: str,
        *,
        max_model_len: int,
        vocab_size: int,
        created_s: int,
        root: str | None = None,
        tokenizer: TextTokenizer | None = None,
        chat_template: ChatTemplate | None = None,
        tool_parser: ToolParser | None = None,
        reasoning_parser: ReasoningParser = "none",
        sampling_defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.sampling_defaults = dict(sampling_defaults or {})
        template = "" if chat_template is None else chat_template.text
        self.reasoning_parser = find_reasoning_parser(reasoning_parser, template)
        self.thoughts = THOUGHTS.get(self.reasoning_parser)
        self.tool_parser: ToolParser | None = tool_parser
        if tool_parser is None and self.reasoning_parser == "harmony":
            self.tool_parser = "harmony"
        self.max_model_len, self.vocab_size = max_model_len, vocab_size
        self._created_s = created_s
        self._root = root or name
        self._tokenizer = tokenizer
        self._chat_template = chat_template

    @property
    def reply_tokens(self) -> int:
        """Default `max_tokens` of a chat: the model's own default, or else the context length."""
        return int(self.sampling_defaults.get("max_tokens", self.max_model_len))

    def card(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "cbatch",
            "root": self._root,
            "parent": None,
            "max_model_len": self.max_model_len,
        }

    def require(self, name: str | None) -> None:
        """Raise `UnknownModelError` for another model's name. A request need not name a model."""
        if name not in (None, self.name):
            raise UnknownModelError("model", f"{name!r} is not served", f"use {self.name!r}")

    @property
    def tokenizer(self) -> TextTokenizer:
        if self._tokenizer is None:
            raise FieldError("prompt", "is text, but there is no tokenizer", "give token ids")
        return self._tokenizer

    @property
    def chats(self) -> bool:
        """True if the model has a chat template."""
        return self._chat_template is not None

    @property
    def template_source(self) -> str | None:
        """Path or name of the chat template."""
        return None if self._chat_template is None else self._chat_template.source

    def decode(self, ids: Sequence[int], **options: bool) -> str:
        """Return the text of token ids; empty without a tokenizer."""
        return "" if self._tokenizer is None else self._tokenizer.decode(ids, **options)

    def token_texts(
        self, ids: Sequence[int], params: SamplingParams, text: str | None
    ) -> list[str | None]:
        """See `cbatch.text.output_processor.token_texts`."""
        return token_texts(ids, params, self._tokenizer, text)

    def prompt_end(self, ids: Sequence[int]) -> str:
        """Return the end of a prompt's text, with its special tokens."""
        return self.tokenizer.decode(ids[-_PROMPT_END_TOKENS:], skip_special_tokens=False)

    def around_answer(self, ids: Sequence[int]) -> str | None:
        """Return the grammar around a structured answer to a prompt, see `thought_grammar`."""
        if self.thoughts is None:
            return None
        return around_answer(self.thoughts, self.tokenizer, self.prompt_end(ids))

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def require_length(self, field: str, text: str) -> None:
        """Raise `FieldError` if a text cannot fit in the context, judged by its length alone."""
        require_length(field, text, self.tokenizer, self.max_model_len)

    def encode(self, field: str, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Return the ids of a rendered conversation. Raises `FieldError` if it is too long."""
        self.require_length(field, text)
        control_tokens = self.tokenizer.control_tokens
        return tuple(control_tokens.encode(text, add_special_tokens=add_special_tokens))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the conversation as the chat template writes it, for `encode`. Text in messages
        cannot become control tokens, which could end a turn and begin another. Raises `FieldError`
        if there is no template, or the template cannot render the conversation."""
        if self._chat_template is None:
            raise FieldError(
                "messages",
                f"{self.name!r} has no chat template",
                "use /v1/completions, or start the server with --chat-template (a file, or a name)",
            )
        escape = self.tokenizer.control_tokens.escape
        try:
            return self._chat_template.render(
                escape(messages),
                tools=escape(tools),
                add_generation_prompt=add_generation_prompt,
                variables=escape(variables),
            )
        except RecursionError as error:
            raise FieldError("messages", "are nested too deeply", "send plain ones") from error
        except ChatTemplateError as error:
            verb, remedy = "cannot render", "start the server with another --chat-template"
            if error.refused:
                verb, remedy = "refuses", "change the conversation as it says"
            problem = f"the chat template {verb} them ({error})"
            raise FieldError("messages", problem, remedy) from error
