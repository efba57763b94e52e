"""Rendering and tokenizing of prompts. Chat templates and tokenizers' regular expressions come with
the model and may take any time on a client's text. They run in workers, so that other clients'
requests do not wait. Workers also tokenize long texts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import cbatch.server.protocol.requests  # noqa: F401 - its functions are tasks of workers
from cbatch.core.request.errors import FieldError
from cbatch.grammars import Grammars
from cbatch.server.protocol.errors import ServiceDownError
from cbatch.server.protocol.fields import AnyPrompt, PendingPrompt, text_ids
from cbatch.server.protocol.model import ServedModel
from cbatch.server.serving.admission_queue import AdmissionQueue, Limits
from cbatch.system.shares import NoPlaceError, Places
from cbatch.text.output_processor import token_ids
from cbatch.workers import NoWorkerError, TaskLimits, WorkerDiedError, WorkerPool

SHORT_BYTES = 10_000  # a longer text is tokenized in a worker, by a slow task
QUICK_CPU_S = 0.25  # processor time after which a quick task is started again as a slow task
MAX_QUICK = MAX_SLOW = 2  # concurrent tasks of each kind
WAIT_S = 30.0  # longest wait before a task may run
T = TypeVar("T")
_logger = logging.getLogger("cbatch")


class WorkerState:
    """The argument of workers' tasks: the served model, and grammars. `eos_ids` is None if the
    engine does not support grammars."""

    def __init__(
        self, model: ServedModel, vocab_size: int, eos_ids: tuple[int, ...] | None
    ) -> None:
        self.model = model
        self.grammars = Grammars(lambda: model.tokenizer, vocab_size, eos_ids or (), kept_s=0)
        if eos_ids is not None:
            self.grammars.prepare()
        with suppress(FieldError):  # lazy attributes that this creates are shared by all workers
            model.encode("messages", "a", add_special_tokens=True)


class PromptReader:
    """Tokenizes prompts, for the coroutines of one event loop."""

    def __init__(
        self, model: ServedModel, workers: WorkerPool, limits: Limits, queue: AdmissionQueue
    ) -> None:
        self._model, self._workers, self._queue = model, workers, queue
        self._limits = TaskLimits(limits.prompt_timeout_s, limits.prompt_memory_bytes, aside=True)
        self._quick, self._slow = Places(MAX_QUICK), Places(MAX_SLOW)

    async def ids(self, prompt: AnyPrompt, owner: str | None) -> tuple[int, ...]:
        if isinstance(prompt, str):
            tokenizer = self._model.tokenizer
            if len(prompt) <= SHORT_BYTES and not tokenizer.has_patterns:
                return token_ids(prompt, tokenizer)
            return await self.run(partial(text_ids, prompt), len(prompt), "prompt", owner)
        if isinstance(prompt, PendingPrompt):
            try:
                return await self.run(prompt.task, prompt.num_bytes, prompt.field, owner)
            finally:
                prompt.drop()
        return token_ids(prompt, None)

    async def run(
        self, task: Callable[[ServedModel], T], num_bytes: int, field: str, owner: str | None
    ) -> T:
        """Run `task` on the model in a worker, and return its result. Owners take turns.
        `num_bytes` is the size of its input, `field` the input's field in the request. Raises what
        `task` raises, `FieldError` if the task exceeds the limits on time or memory, and
        `ServiceError`."""
        try:
            if num_bytes <= SHORT_BYTES:
                cpu_s = min(QUICK_CPU_S, self._limits.cpu_s)
                quick = self._limits._replace(cpu_s=cpu_s, aside=False)
                async with self._quick.place(owner, WAIT_S):
                    with suppress(WorkerDiedError):
                        return await self._workers.run(partial(on_model, task), quick)
            async with self._slow.place(owner, WAIT_S):
                return await self._workers.run(partial(on_model, task), self._limits)
        except NoPlaceError as error:
            raise self._queue.overloaded("prompts", f"prompts wait for workers; {error}") from error
        except WorkerDiedError as error:
            raise self._limit_error(field, error) from error
        except NoWorkerError as error:
            raise ServiceDownError(str(error), 1) from error

    def _limit_error(self, field: str, error: WorkerDiedError) -> FieldError:
        limit = f"{self._limits.memory_bytes >> 20} MiB"
        remedy = "--prompt-memory-bytes"
        if error.overran:
            limit = f"{self._limits.cpu_s:g} s of CPU time"
            remedy = "--prompt-timeout"
        reader = "the tokenizer"
        if field == "messages":
            reader = f"the chat template ({self._model.template_source}) or {reader}"
        problem = f"{reader} exceeds {limit} for this prompt"
        refusal = FieldError(
            field, problem, f"send a shorter prompt, or start the server with a larger {remedy}"
        )
        _logger.warning("%s", refusal)
        return refusal


def on_model(task: Callable[[ServedModel], T], state: WorkerState) -> T:
    return task(state.model)
