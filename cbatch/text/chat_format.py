"""How a model converses: conversations become token ids, and replies are thoughts and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import structs

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import SamplingParams
from cbatch.text import ChatTemplate, ChatTemplateError, TextTokenizer
from cbatch.text.forced_tools import Tool
from cbatch.text.messages import conversation, template_variables
from cbatch.text.output_processor import require_length
from cbatch.text.thought_grammar import FreeCalls, surrounding_grammar
from cbatch.text.tool_parsers import THOUGHTS, ReasoningParser, find_reasoning_parser

_PROMPT_END_TOKENS = 32  # last tokens of a prompt that are searched for marks


class ChatFormat:
    """Converter of conversations to prompts. `name` is the model's name in messages, and
    `reasoning_parser` the format of its thoughts."""

    # Remedies in errors: without a chat template, and if the template fails.
    no_template_remedy = "use `generate`, or a model with a chat template"
    failing_template_remedy = "use a model with another chat template"

    def __init__(
        self,
        name: str,
        *,
        max_model_len: int,
        tokenizer: TextTokenizer | None = None,
        chat_template: ChatTemplate | None = None,
        reasoning_parser: ReasoningParser = "none",
    ) -> None:
        self.name, self.max_model_len = name, max_model_len
        template = "" if chat_template is None else chat_template.text
        self.reasoning_parser = find_reasoning_parser(reasoning_parser, template)
        self.thoughts = THOUGHTS.get(self.reasoning_parser)
        self._tokenizer, self._chat_template = tokenizer, chat_template

    @property
    def tokenizer(self) -> TextTokenizer:
        if self._tokenizer is None:
            raise FieldError("prompt", "is text, but there is no tokenizer", "give token ids")
        return self._tokenizer

    def prompt_ids(
        self,
        messages: Any,
        *,
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
    ) -> tuple[int, ...]:
        """Return the token ids of a conversation in the API's form. `variables` are other variables
        of the template. Raises `FieldError`, also if the conversation is too long."""
        text = self.render(
            conversation(messages),
            tools=msgspec.to_builtins(tools) or None,
            add_generation_prompt=add_generation_prompt,
            variables=template_variables(variables),
        )
        return self.encode("messages", text, add_special_tokens=add_special_tokens)

    def prompt_end(self, ids: Sequence[int]) -> str:
        """Return the end of a prompt's text, with its special tokens."""
        return self.tokenizer.decode(ids[-_PROMPT_END_TOKENS:], skip_special_tokens=False)

    def constrain(
        self, params: SamplingParams, ids: Sequence[int], calls: FreeCalls | None = None
    ) -> SamplingParams:
        """Return `params` with the grammar of the text around a structured output. After some
        prompts the model begins with a thought, and only the answer after it has the structure.
        In place of the answer the model may make `calls`. Raises `FieldError`."""
        output, thoughts = params.structured_outputs, self.thoughts
        if output is None or calls is None and (output.around is not None or thoughts is None):
            return params
        around = surrounding_grammar(thoughts, self.tokenizer, self.prompt_end(ids), calls)
        return structs.replace(params, structured_outputs=structs.replace(output, around=around))

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
            problem = f"{self.name!r} has no chat template"
            raise FieldError("messages", problem, self.no_template_remedy)
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
            verb, remedy = "cannot render", self.failing_template_remedy
            if error.refused:
                verb, remedy = "refuses", "change the conversation as it says"
            problem = f"the chat template {verb} them ({error})"
            raise FieldError("messages", problem, remedy) from error
