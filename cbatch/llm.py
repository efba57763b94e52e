"""Complete many prompts at once, from Python."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from cbatch.assembly import EngineOptions, load_engine
from cbatch.choices import Prompt
from cbatch.core.errors import FieldError
from cbatch.core.request import SamplingParams
from cbatch.notyet import refuse_options
from cbatch.outputs import Accepted, Choice, Completion, Output
from cbatch.stepwise import Engine

_logger = logging.getLogger("cbatch")


class LLM:
    """A model ready to complete prompts. `model` and `draft` are Hugging Face directories (or hub
    names); the options are the fields of `EngineOptions`. `info` says what was put together."""

    def __init__(self, model: str | Path, draft: str | Path | None = None, **options: Any) -> None:
        refuse_options(options)
        self.engine, self.info = load_engine(model, draft, EngineOptions(**options))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """One completion for each prompt (text or token ids), in order.

        `params` serves all prompts, or one each. A request that cannot run is answered with its
        `error`, which names the field; the others go on. Raises `FieldError` only where the number
        of `params` is not the number of prompts.
        """
        batch = as_batch(prompts)
        if params is None or isinstance(params, SamplingParams):
            each: list[SamplingParams | None] = [params] * len(batch)
        else:
            each = list(params)
        if len(each) != len(batch):
            raise FieldError(
                "params", f"{len(each)} for {len(batch)} prompts", "give one, or one for each"
            )
        if not progress:
            return complete_all(self.engine, batch, each)
        from cbatch.cli.progress import ProgressBar

        with ProgressBar(len(batch)) as bar:
            return complete_all(self.engine, batch, each, on_outputs=bar.update)


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A lone prompt, text or token ids, is a batch of one."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(p, int) for p in prompts):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))


def complete_all(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams | None],
    *,
    on_outputs: Callable[[list[Output]], None] | None = None,
) -> list[Completion]:
    """Runs the engine until every one of these prompts is answered. If it is interrupted (or
    `on_outputs` raises) what still runs is cancelled, so that the engine can be used again."""
    collector = Collector()
    answers: list[str | Completion] = []
    try:
        for prompt, each in zip(prompts, params, strict=True):
            try:
                accepted = engine.add(prompt, each)
            except FieldError as error:
                answers.append(refused(prompt, error))
            else:
                answers.append(accepted.request_id)
                collector.expect(accepted)
        while collector.waiting:
            outputs = engine.step()
            collector.take(outputs)
            if on_outputs:
                on_outputs(outputs)
    finally:
        for request_id in list(collector.waiting):
            engine.cancel(request_id)
    return [collector.done[a] if isinstance(a, str) else a for a in answers]


def refused(prompt: Prompt, error: FieldError) -> Completion:
    ids = () if isinstance(prompt, str) else tuple(prompt)
    return Completion("", ids, None, error=str(error))


class Collector:
    """Gathers the choices of each request until all are there."""

    def __init__(self) -> None:
        self.waiting: dict[str, tuple[Accepted, list[Choice]]] = {}
        self.done: dict[str, Completion] = {}

    def expect(self, accepted: Accepted) -> None:
        self.waiting[accepted.request_id] = (accepted, [])

    def take(self, outputs: Sequence[Output]) -> list[Completion]:
        """The requests that these outputs complete."""
        completed = []
        for output in outputs:
            if output.finished is None or output.request_id not in self.waiting:
                continue
            accepted, choices = self.waiting[output.request_id]
            choices.append(output.finished)
            if len(choices) == accepted.num_choices:
                del self.waiting[output.request_id]
                completed.append(_completion(accepted, choices))
                self.done[output.request_id] = completed[-1]
        return completed


def _completion(accepted: Accepted, choices: list[Choice]) -> Completion:
    ordered = tuple(sorted(choices, key=lambda c: c.index))
    error = next((c.error for c in ordered if c.error), None)
    return Completion(accepted.request_id, accepted.prompt_token_ids, accepted.seed, ordered, error)
