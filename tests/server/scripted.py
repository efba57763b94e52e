"""A server whose model is scripted: each choice is a given text. Its tokens take the same path as
those of an engine."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from tokenizers import AddedToken, Tokenizer

from cbatch.core.request.output import OutputRow
from cbatch.core.request.request import FinishReason, Request, SamplingParams
from cbatch.server.protocol.errors import ServiceError
from cbatch.server.protocol.fields import ApiRequest, PendingPrompt
from cbatch.server.serving.admission_queue import AdmissionQueue, Limits
from cbatch.server.serving.open_request import OpenRequest
from cbatch.text import ChatTemplate, TextTokenizer
from cbatch.text.output_processor import LiveChoice
from tests.server.http_client import Client, open_request, serving_service
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
    A request ends with `error` after its first output, or before any output if `at_once`.
    `params` and `prompt` are those of the last call, as an engine would get them.
    """

    running = ready = True
    num_requests = num_restarts = 0
    stats = None
    limits = Limits()
    text, reason, step_tokens, late = "", FinishReason.STOP, 3, False
    error: ServiceError | None = None
    at_once = False
    params: SamplingParams
    prompt = ""

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
        self.prompt = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        opened = open_request(ids, n=params.n)
        opened.cached_tokens = 3
        max_steps = math.inf if self.error is None else 0 if self.at_once else 1
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
                if number > max_steps:
                    break
                ends = number == len(steps) and not self.late
                output = choice.extend(OutputRow("r", step, 0, 0, self.reason if ends else None))
                opened.put(output)
                if output.finished is not None:
                    break
            else:
                opened.put(choice.extend(OutputRow("r", finish_reason=self.reason)))
        if self.error is not None:
            opened.fail(self.error)
        yield opened


QWEN = tokenizer_with(
    ["<think>", "</think>", "<tool_call>", "</tool_call>"], ["<|im_start|>", "<|im_end|>"]
)
TEMPLATE = """\
{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.reasoning }}\
{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.arguments | tojson }}{% endfor %}\
{{ m.tool_call_id }}{% endfor %}[assistant]\
{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"""
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


class Scripted(NamedTuple):
    service: Any
    client: Client

    def restore(self) -> None:
        """Forget the script of a test."""
        kept = ("tokenizer", "queue", "model")
        self.service.__dict__ = {name: self.service.__dict__[name] for name in kept}


@contextmanager
def scripted_server(**options: Any) -> Iterator[Scripted]:
    """Serve a model that may think and call functions."""
    service: Any = ScriptedService(QWEN)
    parsers: Any = {"reasoning_parser": "qwen3", "tool_parser": "hermes"}
    options = {"chat_template": ChatTemplate(TEMPLATE, {}, "the test")} | parsers | options
    with serving_service(service, QWEN, **options) as client:
        yield Scripted(service, client)
