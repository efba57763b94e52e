"""How a model converses: conversations become token ids, and replies are thoughts and text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import SamplingParams
from cbatch.text import ChatTemplate, ChatTemplateError, TextTokenizer
from cbatch.text.forced_tools import MAX_CALLS, Tool, parameters_of
from cbatch.text.messages import conversation, template_variables
from cbatch.text.output_processor import require_length
from cbatch.text.reply_formats import ThoughtFormat, ToolCallFormat
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


_TOKENS_IN_MARKS = re.compile(r"(<[^<>]+>|\[[^][]+\])")


class FreeCalls(NamedTuple):
    """Calls that the model may make. The arguments of `strict` tools follow their schema."""

    form: ToolCallFormat
    tools: list[Tool]
    parallel: bool


def surrounding_grammar(
    thoughts: ThoughtFormat | None,
    tokenizer: TextTokenizer,
    prompt_end: str,
    calls: FreeCalls | None = None,
) -> str | None:
    """Return the Lark grammar of the whole reply, in which `@answer` is the structured part. Return
    None if the whole reply is the answer. Raises `FieldError` for tools."""
    added = {text: token_id for token_id, text in tokenizer.added.items()}
    before, reply, rules = "", "@answer", list[str]()
    if thoughts is not None and not prompt_end.rstrip().endswith(thoughts.close_mark):
        gap = _mark(thoughts.prompt_end, added) if thoughts.anywhere else r"/\n{0,2}/"
        before, reply = f"thought {gap}", f"{_mark(thoughts.answer_mark, added)} @answer"
        if not thoughts.reply_starts_inside(prompt_end):
            before = f"({_mark(thoughts.open_mark, added)} {before})?"
        rules += _thought_rules(thoughts, tokenizer, added)
    if calls is not None:
        reply = f"({reply} | calls)"
        rules += _free_call_rules(calls, added)
    return "\n".join([f"start: {before} {reply}", *rules]) if rules else None


def _thought_rules(
    thoughts: ThoughtFormat, tokenizer: TextTokenizer, added: dict[str, int]
) -> list[str]:
    """Return the rules of a thought: any text up to its closing mark. It must not contain control
    tokens such as EOS, since an answer has to follow."""
    excluded_ids = tokenizer.special_ids | {added.get(thoughts.close_mark)}
    allowed_ids = sorted(i for i in added.values() if i not in excluded_ids)
    others = f"(text? <[{_ranges(allowed_ids)}]>)* " if allowed_ids else ""
    token = f"text? <[{added[thoughts.close_mark]}]> | " if thoughts.close_mark in added else ""
    closing = re.escape(thoughts.close_mark).replace("/", r"\/")
    return [
        f"thought: {others}({token}last)",
        "text: /(?s:.+)/",
        f"last[lazy]: /(?s:.*){closing}/",
    ]


def _free_call_rules(calls: FreeCalls, added: dict[str, int]) -> list[str]:
    """Return the rules of calls. Their JSON is made of the lexemes of `%json`, as the lexer takes
    the longest one: the answer may be JSON as well."""
    form, schemas = calls.form, parameters_of(calls.tools)
    names_by_schema: dict[str, list[str]] = {}
    for function in (tool.function for tool in calls.tools):
        schema = schemas[function.name] if function.strict else {"type": "object"}
        text = json.dumps(schema, ensure_ascii=False)
        names_by_schema.setdefault(text, []).append(function.name)

    def any_call(before: str, after: str, quote: Callable[[str], str]) -> str:
        choices = (" | ".join(json.dumps(quote(n)) for n in ns) for ns in names_by_schema.values())
        return " | ".join(f"{before} ({c}) {after} arguments{at}" for at, c in enumerate(choices))

    rules = [f"arguments{at}: %json {schema}" for at, schema in enumerate(names_by_schema)]
    names = f'"{form.name}"', f'"{form.arguments}"'
    words = (json.dumps(word) for word in ("{", names[0], ":", ",", names[1], ":"))
    start, name, colon, *rest = (f"{word} blank" for word in words)
    members = any_call(f"{start} {name} {colon}", f"blank {' '.join(rest)}", json.dumps)
    rules += [r"blank: /[ \n]?/", f"members: {members}", 'call: members blank "}"']
    separator = form.separator if calls.parallel else None
    shapes = []
    for n, shape in enumerate(form.shapes):
        if "{name}" in shape:
            before, _, after = (_mark(part, added) for part in shape.partition("{name}"))
            rules.append(f"named{n}: {any_call(before, after, str)}")
            shapes.append(_several(f"named{n}", None if separator is None else "blank"))
        else:
            before, _, after = (_marks(part, added) for part in shape.partition("{call}"))
            several = _several("call", None if separator is None else _marks(separator, added))
            shapes.append(f"{before} {several} {after}")
    return [f"calls: {' | '.join(shapes)}", *rules]


def _several(item: str, separator: str | None) -> str:
    return item if separator is None else f"{item} ({separator} {item}){{0,{MAX_CALLS - 1}}}"


def _marks(text: str, added: dict[str, int]) -> str:
    return " blank ".join(["", *(_mark(part, added) for part in text.split()), ""])


def _ranges(ids: list[int]) -> str:
    """Return sorted ids as ranges in Lark, since tokenizers may have thousands of added tokens."""
    runs = [list(run) for _, run in groupby(enumerate(ids), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0][1]}-{run[-1][1]}" for run in runs)


def _mark(text: str, added: dict[str, int]) -> str:
    parts = [part for part in _TOKENS_IN_MARKS.split(text) if part]
    return " ".join(
        f"({json.dumps(part)} | <[{added[part]}]>)" if part in added else json.dumps(part)
        for part in parts
    )
