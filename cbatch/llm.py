"""Offline inference from Python: `LLM`, and batches of prompts in an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from msgspec.structs import replace

from cbatch.core.request.errors import FieldError, short
from cbatch.core.request.request import SamplingParams, StructuredOutputs
from cbatch.core.request.typed import converted
from cbatch.engine.build import load_engine
from cbatch.engine.engine import Engine
from cbatch.engine.model_files import chat_template_of
from cbatch.engine.options import settings_of_keywords
from cbatch.engine.progress import ProgressBar
from cbatch.text.chat_format import ChatFormat
from cbatch.text.forced_tools import Tools
from cbatch.text.messages import list_problem, template_variables
from cbatch.text.output_processor import Prompt
from cbatch.text.outputs import Accepted, Choice, Completion, Output

Key = TypeVar("Key")


class LLM:
    """A loaded model that completes prompts. `model` and `draft` are Hugging Face directories, hub
    names or `.gguf` files. `options` are `speculative_config` and the fields of `EngineOptions`,
    also under vLLM's names. `info` is an `EngineInfo`."""

    def __init__(self, model: str | Path, draft: str | Path | None = None, **options: Any) -> None:
        settings = settings_of_keywords(options if draft is None else {"draft": draft} | options)
        self.engine, self.info = load_engine(model, settings.draft, settings.engine)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Return one completion per prompt (text or token ids), in order.

        `params` are for all prompts, or a sequence with one per prompt; None means the model's
        defaults (`info.sampling_defaults`). The completion of a request that cannot run has an
        `error` that names the field. Raises `FieldError` if `prompts` is not a sequence, or if
        `params` has the wrong type or length.
        """
        batch = as_batch(prompts)
        return self._complete(batch, self._for_each(params, len(batch), "params"), progress)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        schema: Mapping[str, Any] | str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool = False,
    ) -> list[Completion]:
        """Return one completion per conversation: a list of messages in the form of OpenAI's API,
        or a list of such lists. The text is that of `/v1/chat/completions`, before tool calls and
        thoughts are parsed. `sampling_params`, errors and `progress` are as in `generate`.

        `tools` are for the chat template, and `chat_template_kwargs` its other variables. The
        answer follows the JSON `schema`, which may be text, and then the model cannot call tools.
        With `add_generation_prompt` off, the prompt ends after the last message.
        """
        conversations = _as_conversations(messages)
        params = self._for_each(sampling_params, len(conversations), "sampling_params")
        if schema is not None:
            output = StructuredOutputs(json=converted("schema", schema, dict[str, Any] | str))
            self.engine.check_grammar(output, "schema")
            if any(each.structured_outputs is not None for each in params):
                problem = "and `structured_outputs` exclude each other"
                raise FieldError("schema", problem, "leave one out")
            params = [replace(each, structured_outputs=output) for each in params]
        checked_tools = converted("tools", list(tools or ()), Tools)
        template_variables(chat_template_kwargs)
        prompts: list[Prompt] = []
        refused: dict[int, Completion] = {}
        for i, conversation in enumerate(conversations):
            try:
                ids = self._chat_format.prompt_ids(
                    conversation,
                    tools=checked_tools,
                    add_generation_prompt=add_generation_prompt,
                    variables=chat_template_kwargs,
                )
                params[i] = self._chat_format.constrain(params[i], ids)
                prompts.append(ids)
            except FieldError as error:
                refused[i] = Completion("", (), None, error=str(error))
        accepted = [each for i, each in enumerate(params) if i not in refused]
        answers = iter(self._complete(prompts, accepted, progress))
        return [refused.get(i) or next(answers) for i in range(len(conversations))]

    @cached_property
    def _chat_format(self) -> ChatFormat:
        return ChatFormat(
            self.info.model,
            max_model_len=self.info.max_model_len,
            tokenizer=self.engine.tokenizer,
            chat_template=chat_template_of(self.info.model),
            reasoning_parser="auto",
        )

    def _for_each(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int, field: str
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.engine.default_params] * count
        if not all(each is None or isinstance(each, SamplingParams) for each in params):
            problem = f"{short(params)} is not allowed"
            raise FieldError(field, problem, "give SamplingParams, or one for each prompt")
        if len(params) != count:
            problem = f"{len(params)} for {count} prompts"
            raise FieldError(field, problem, "give one, or one for each")
        return [each or self.engine.default_params for each in params]

    def _complete(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], progress: bool
    ) -> list[Completion]:
        if not progress:
            return complete_all(self.engine, prompts, params)
        with ProgressBar(len(prompts)) as bar:
            return complete_all(self.engine, prompts, params, on_outputs=bar.update)


def _as_conversations(messages: Sequence[Any]) -> list[list[Any]]:
    """Return a list of conversations; a single conversation becomes a list of one. Raises
    `FieldError`."""
    if not isinstance(messages, list | tuple) or not messages:
        remedy = 'give [{"role": "user", "content": "..."}], or a list of such lists'
        raise FieldError("messages", list_problem(messages), remedy)
    if all(isinstance(each, list | tuple) for each in messages):
        return [list(each) for each in messages]
    return [list(messages)]


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts; a single prompt (text or token ids) becomes a list of one. Raises
    `FieldError` if `prompts` is not a sequence."""
    if isinstance(prompts, str | bytes):
        return [prompts]
    try:
        batch = list(prompts)
    except TypeError as error:
        problem = f"{short(prompts)} is not allowed"
        raise FieldError("prompts", problem, "give texts or lists of token ids") from error
    if batch and all(isinstance(p, int) for p in batch):
        return [cast(list[int], batch)]
    return cast(list[Prompt], batch)


def complete_all(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams | None],
    *,
    on_outputs: Callable[[list[Output]], None] | None = None,
) -> list[Completion]:
    """Step the engine until all prompts are complete, and return their completions in order.

    `on_outputs` is called with the outputs of each step. After an interrupt or any other exception
    the unfinished requests are cancelled, so that the engine can be used again."""
    batch: Batch[int] = Batch(engine)
    done: dict[int, Completion] = {}
    try:
        for i, (prompt, prompt_params) in enumerate(zip(prompts, params, strict=True)):
            rejection = batch.add(i, prompt, prompt_params)
            if rejection is not None:
                done[i] = rejection
        while batch.waiting:
            outputs = engine.step()
            done |= batch.take(outputs)
            if on_outputs:
                on_outputs(outputs)
    finally:
        for request_id in list(batch.waiting):
            engine.cancel(request_id)
    return [done[i] for i in range(len(prompts))]


class Batch(Generic[Key]):
    """Prompts in an engine, each with a key that the caller chooses. `waiting` has the incomplete
    requests by request id: key, `Accepted`, and the choices that are finished so far."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.waiting: dict[str, tuple[Key, Accepted, list[Choice]]] = {}

    def add(
        self, key: Key, prompt: Prompt, params: SamplingParams | None, *, priority: int = 0
    ) -> Completion | None:
        """Add a request to the engine. Returns None, or, for an invalid request, a completion with
        the error."""
        try:
            accepted = self._engine.add(prompt, params, priority=priority)
        except FieldError as error:
            ids = tuple(prompt) if isinstance(prompt, list | tuple) else ()
            return Completion("", ids, None, error=str(error))
        self.waiting[accepted.request_id] = (key, accepted, [])
        return None

    def take(self, outputs: Sequence[Output]) -> list[tuple[Key, Completion]]:
        completed = []
        for output in outputs:
            if output.finished is None or output.request_id not in self.waiting:
                continue
            key, accepted, choices = self.waiting[output.request_id]
            choices.append(output.finished)
            if len(choices) == accepted.num_choices:
                del self.waiting[output.request_id]
                completed.append((key, _completion(accepted, choices)))
        return completed


def _completion(accepted: Accepted, choices: list[Choice]) -> Completion:
    ordered = tuple(sorted(choices, key=lambda c: c.index))
    error = next((c.error for c in ordered if c.error), None)
    return Completion(accepted.request_id, accepted.prompt_token_ids, accepted.seed, ordered, error)
