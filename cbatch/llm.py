"""Complete many prompts at once, from Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from cbatch.core.request.errors import FieldError, short
from cbatch.core.request.request import SamplingParams
from cbatch.core.request.unsupported import refuse_options
from cbatch.engine.build import load_engine
from cbatch.engine.engine import Engine
from cbatch.engine.options import EngineOptions
from cbatch.text.output_processor import Prompt
from cbatch.text.outputs import Accepted, Choice, Completion, Output

Key = TypeVar("Key")


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

        `params` serves all prompts, or one each; None stands for the model's own defaults
        (`info.sampling_defaults`). A request that cannot run is answered with its
        `error`, which names the field; the others go on. Raises `FieldError` only where `prompts`
        is no sequence, or `params` are no `SamplingParams` or not as many as there are prompts.
        """
        batch = as_batch(prompts)
        if params is None or isinstance(params, SamplingParams):
            each: list[SamplingParams | None] = [params] * len(batch)
        else:
            each = list(params)
            if not all(one is None or isinstance(one, SamplingParams) for one in each):
                problem = f"{short(params)} is not allowed"
                raise FieldError("params", problem, "give SamplingParams, or one for each prompt")
        if len(each) != len(batch):
            raise FieldError(
                "params", f"{len(each)} for {len(batch)} prompts", "give one, or one for each"
            )
        if not progress:
            return complete_all(self.engine, batch, each)
        from cbatch.engine.progress import ProgressBar

        with ProgressBar(len(batch)) as bar:
            return complete_all(self.engine, batch, each, on_outputs=bar.update)


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A lone prompt, text or token ids, is a batch of one."""
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
    """Runs the engine until every one of these prompts is answered. If it is interrupted (or
    `on_outputs` raises) what still runs is cancelled, so that the engine can be used again."""
    batch: Batch[int] = Batch(engine)
    done: dict[int, Completion] = {}
    try:
        for at, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            refusal = batch.add(at, prompt, each)
            if refusal is not None:
                done[at] = refusal
        while batch.waiting:
            outputs = engine.step()
            done |= batch.take(outputs)
            if on_outputs:
                on_outputs(outputs)
    finally:
        for request_id in list(batch.waiting):
            engine.cancel(request_id)
    return [done[at] for at in range(len(prompts))]


class Batch(Generic[Key]):
    """Prompts in an engine, each under a key of the caller's, until all choices of it are there.
    `waiting` has those that are not, by request id."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.waiting: dict[str, tuple[Key, Accepted, list[Choice]]] = {}

    def add(
        self, key: Key, prompt: Prompt, params: SamplingParams | None, *, priority: int = 0
    ) -> Completion | None:
        """None: it runs. A prompt that cannot is answered at once."""
        try:
            accepted = self._engine.add(prompt, params, priority=priority)
        except FieldError as error:
            ids = tuple(prompt) if isinstance(prompt, list | tuple) else ()
            return Completion("", ids, None, error=str(error))
        self.waiting[accepted.request_id] = (key, accepted, [])
        return None

    def take(self, outputs: Sequence[Output]) -> list[tuple[Key, Completion]]:
        """What these outputs complete."""
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
