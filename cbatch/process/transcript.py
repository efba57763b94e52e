"""Open requests, as the engine client stores them."""

from __future__ import annotations

from typing import Protocol

from cbatch.core.request.logprobs import TokenLogprobs
from cbatch.core.request.output import Ending, OutputRow
from cbatch.core.request.request import Request


class Listener(Protocol):
    """Receives the events of one request, on the event loop. No event follows an ending, or a
    cancel or finish by the owner. If a method raises, `on_failed` is called; no other request is
    affected."""

    def on_admitted(self, ago_s: float) -> None:
        """The request got a slot `ago_s` seconds ago. Called once, also if the engine restarts."""

    def on_logprobs(self, entry: TokenLogprobs) -> None:
        """Log probabilities of the prompt, or of the tokens of the next `on_step`."""

    def on_step(self, row: OutputRow, ending: Ending | None) -> None:
        """New tokens, with the ending if there is one."""

    def on_end(self, ending: Ending) -> None: ...

    def on_lost(self, message: str) -> None:
        """The engine is gone for good."""

    def on_failed(self, error: Exception) -> None:
        """The request failed, in this process or in the listener, and was dropped."""


class Transcript:
    """An open request. `group_id` is the id of the first request that was added with it."""

    def __init__(self, request: Request, listener: Listener, group_id: str) -> None:
        self.request = request
        self.listener = listener
        self.group_id = group_id
        self.tokens: list[int] = []
        self.wire_id: str | None = None  # its id in the running engine, if it was sent there
        self.admitted = False
