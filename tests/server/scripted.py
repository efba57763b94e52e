"""A service that returns a given text for each choice. Its tokens take the same path as an
engine's."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

from tokenizers import AddedToken, Tokenizer

from cbatch.core.request.output import OutputRow
from cbatch.core.request.request import FinishReason, Request, SamplingParams
from cbatch.server.protocol.fields import ApiRequest, PendingPrompt
from cbatch.server.serving.admission_queue import AdmissionQueue, Limits
from cbatch.server.serving.open_request import OpenRequest
from cbatch.text import TextTokenizer
from cbatch.text.output_processor import LiveChoice
from tests.server.http_client import open_request
from tests.text.toy_tokenizers import printable

EOS = 0


def tokenizer_with(plain: Sequence[str] = (), special: Sequence[str] = ()) -> TextTokenizer:
    """Return the toy tokenizer with additional text tokens and control tokens."""
    raw = Tokenizer.from_str(printable().to_str())  # a copy, since others share the original
    raw.add_tokens([AddedToken(text, normalized=False) for text in plain])
    raw.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    return TextTokenizer(raw, "toy")


class ScriptedService:
    """A service whose choices are the tokens of `text`, `step_tokens` of them per step.

    A choice ends for `reason` with the last token (EOS, for a stop) or, if `late`, in a later step.
    `params` are the parameters of the last call, as an engine would get them.
    """

    running = ready = True
    num_requests = num_restarts = 0
    stats = None
    limits = Limits()
    text, reason, step_tokens, late = "", FinishReason.STOP, 3, False
    max_steps = math.inf  # later steps do not come
    params: SamplingParams

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.queue = AdmissionQueue(Limits(), time.monotonic)

    async def start(self) -> Any:
        sizes = {"max_model_len": 1024, "vocab_size": self.tokenizer.vocab_size}
        return SimpleNamespace(config=SimpleNamespace(**sizes))

    def open(self, model: Any) -> None:
        self.model = model

    async def stop(self) -> None: ...

    async def submit(self, api_request: ApiRequest) -> AsyncIterator[OpenRequest]:
        (prompt,), params = api_request.prompts, api_request.params
        assert isinstance(prompt, PendingPrompt)
        ids = prompt.make()
        assert prompt.constrain is not None
        self.params = prompt.constrain(params, ids)
        opened = open_request(ids, n=params.n)
        options = {"mark_ids": api_request.mark_ids, "accumulate": not api_request.fields.stream}
        for index in range(params.n):
            request = Request(request_id="r", prompt=ids, params=params, seed=1, choice=index)
            choice = LiveChoice(request, "r", self.tokenizer, **cast(Any, options))
            tokens = self.tokenizer.encode(self.text)
            tokens += [EOS] if self.reason is FinishReason.STOP else []
            steps = [
                tokens[at : at + self.step_tokens] for at in range(0, len(tokens), self.step_tokens)
            ]
            for number, step in enumerate(steps, 1):
                if number > self.max_steps:
                    break
                ends = number == len(steps) and not self.late
                output = choice.extend(OutputRow("r", step, 0, 0, self.reason if ends else None))
                opened.put(output)
                if output.finished is not None:
                    break
            else:
                opened.put(choice.extend(OutputRow("r", finish_reason=self.reason)))
        yield opened
