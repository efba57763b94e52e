"""Request bodies. A later turn of a conversation contains the server's answers to earlier turns."""

from __future__ import annotations

from typing import Any

import msgspec

from bench.load.client.call import TimedCall
from bench.load.client.text import PromptCutter, PromptText
from sim.workload.traces.request import TraceRequest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_TOKENS, MAX_COMPLETION_TOKENS = "max_tokens", "max_completion_tokens"
CHUNK_USAGE = "continuous_usage_stats"
_encode = msgspec.json.Encoder().encode
Messages = list[dict[str, Any]]


class Item(msgspec.Struct, frozen=True):
    """A prompt that the user gave, with further `fields` for its call."""

    prompt: str | list[int] | None = None
    messages: Messages | None = None
    fields: dict[str, Any] = {}


class BodySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for all bodies of a run. `items` are used in rotation; without items, prompts are
    cut from `corpus`. With `conversations`, later turns of a session include its answers."""

    model: str
    chat: bool
    streamed: bool
    fields: dict[str, Any]  # fields of every call
    chunk_usage: bool = True  # ask for usage in every chunk, not only in the last
    left_out: tuple[str, ...] = ()  # parts that the server rejects (`refusals.PARTS`)
    ignore_eos: bool = False
    items: tuple[Item, ...] = ()
    corpus: PromptText | None = None
    conversations: bool = False
    seed: int = 0


class Prepared(msgspec.Struct, frozen=True):
    body: bytes
    call: TimedCall
    keep_text: bool


class Bodies:
    """Builds the bodies of a run's calls, and keeps the transcripts of its conversations."""

    def __init__(self, settings: BodySettings) -> None:
        self._settings = settings
        self.path = CHAT if settings.chat else COMPLETIONS
        self._common: dict[str, Any] = {"model": settings.model} | settings.fields
        if settings.streamed:
            usage = {"include_usage": True}
            if settings.chunk_usage and CHUNK_USAGE not in settings.left_out:
                usage[CHUNK_USAGE] = True
            self._common |= {"stream": True, "stream_options": usage}
        if settings.ignore_eos:
            self._common["ignore_eos"] = True
        self._ids: PromptCutter | None = None
        self._texts: PromptCutter | None = None
        if (corpus := settings.corpus) is not None:
            self._texts = PromptCutter(corpus, settings.seed, as_ids=False)
            if corpus.ids is not None and not settings.chat and "prompt" not in settings.left_out:
                self._ids = PromptCutter(corpus, settings.seed, as_ids=True)
        # By session: messages so far, and their planned number of tokens.
        self._transcripts: dict[str, tuple[Messages, int]] = {}

    def prepare(self, index: int, request: TraceRequest) -> Prepared:
        fields = self._common | {MAX_TOKENS: request.output_tokens}
        session = request.session if self._settings.conversations else None
        if self._settings.items:
            item = self._settings.items[index % len(self._settings.items)]
            fields |= item.fields
            fields |= self._prompt_fields(item.prompt, item.messages)
        elif session is None:
            prompts = self._ids or self._texts
            assert prompts is not None
            fields |= self._prompt_fields(prompts.prompt(index, request))
        else:
            fields |= self._turn(index, request, session)
        max_tokens = fields.get(MAX_COMPLETION_TOKENS, fields[MAX_TOKENS])
        if MAX_TOKENS in self._settings.left_out or MAX_COMPLETION_TOKENS in fields:
            del fields[MAX_TOKENS]
            fields[MAX_COMPLETION_TOKENS] = max_tokens
        for name in {*self._settings.left_out} - {"prompt"}:
            fields.pop(name, None)
        call = TimedCall(index, request.arrival_s, request.prompt_tokens, max_tokens)
        call.ignore_eos = bool(fields.get("ignore_eos"))
        call.session = request.session
        call.slo_s = (request.ttft_slo_s, request.tpot_slo_s, request.e2e_slo_s)
        return Prepared(_encode(fields), call, session is not None)

    def add_answer(self, request: TraceRequest, text: str) -> None:
        """Add the answer to a turn to its session's transcript."""
        if self._settings.conversations and request.session is not None:
            self._transcripts[request.session][0].append({"role": "assistant", "content": text})

    # -- inside

    def _prompt_fields(
        self, prompt: str | list[int] | None, messages: Messages | None = None
    ) -> dict[str, Any]:
        if self._settings.chat:
            return {"messages": messages or [{"role": "user", "content": prompt}]}
        return {"prompt": prompt}

    def _turn(self, index: int, request: TraceRequest, session: str) -> dict[str, Any]:
        """Return the prompt of a turn. A later turn, which has a `think_s`, continues its session's
        transcript, always as text: answers come as text."""
        assert self._texts is not None
        messages, planned_tokens = self._transcripts.get(session, ([], 0))
        if request.think_s is None or not messages:
            messages, message = [], self._texts.prompt(index, request)
        else:
            message = self._texts.message(index, max(1, request.prompt_tokens - planned_tokens))
        messages.append({"role": "user", "content": message})
        self._transcripts[session] = messages, request.prompt_tokens + request.output_tokens
        if self._settings.chat:
            return {"messages": list(messages)}
        return {"prompt": "".join(each["content"] for each in messages)}
