"""The served model: its name, limits and formats, and how its text becomes token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cbatch.core.request.request import SamplingParams
from cbatch.server.protocol.errors import UnknownModelError
from cbatch.text import ChatTemplate, TextTokenizer
from cbatch.text.chat_format import ChatFormat
from cbatch.text.output_processor import token_texts
from cbatch.text.tool_parsers import ReasoningParser, ToolParserSetting, find_tool_parser


class ServedModel(ChatFormat):
    """The model as clients see it. `root` is its path or hub name, `created_s` seconds since the
    epoch. `tool_parser` is the format of its tool calls, None if unknown; `reasoning_parser` the
    format of its thoughts. `sampling_defaults` are the model's defaults for `SamplingParams`."""

    no_template_remedy = (
        "use /v1/completions, or start the server with --chat-template (a file, or a name)"
    )
    failing_template_remedy = "start the server with another --chat-template"

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
        tool_parser: ToolParserSetting | None = None,
        reasoning_parser: ReasoningParser = "none",
        sampling_defaults: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            name,
            max_model_len=max_model_len,
            tokenizer=tokenizer,
            chat_template=chat_template,
            reasoning_parser=reasoning_parser,
        )
        self.sampling_defaults = dict(sampling_defaults or {})
        template = "" if chat_template is None else chat_template.text
        self.tool_parser = find_tool_parser(tool_parser, template)
        self.vocab_size = vocab_size
        self._created_s = created_s
        self._root = root or name

    @property
    def default_max_tokens(self) -> int:
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
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def template_source(self) -> str | None:
        return None if self._chat_template is None else self._chat_template.source

    def decode(self, ids: Sequence[int], **options: bool) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(ids, **options)

    def token_texts(
        self, ids: Sequence[int], params: SamplingParams, text: str | None
    ) -> list[str | None]:
        return token_texts(ids, params, self._tokenizer, text)

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
