"""Open requests as the process that owns their clients keeps them."""

from __future__ import annotations

from typing import Protocol

from cbatch.core.request.logprobs import TokenLogprobs
from cbatch.core.request.output import Ending, OutputRow
from cbatch.core.request.request import Request


class Listener(Protocol):
    """Whoever waits for a request. Called on the event loop. Nothing follows an ending, or a cancel
    or finish by its owner. What one raises is told to it by `on_failed`, and concerns nobody
    else."""

    def on_admitted(self, ago_s: float) -> None:
        """It has left the queue, so long ago: a step is told of when it is over. Once, whatever
        happens to the engine later."""

    def on_logprobs(self, entry: TokenLogprobs) -> None:
        """Of the prompt, or of the tokens that come next."""

    def on_step(self, row: OutputRow, ending: Ending | None) -> None:
        """New tokens, and the end if it came with them."""

    def on_end(self, ending: Ending) -> None: ...

    def on_lost(self, message: str) -> None:
        """The engine is gone for good."""

    def on_failed(self, error: Exception) -> None:
        """It could not be handed on, to the engine or by the listener, and has been given up."""


class Transcript:
    """`call_id`: the first request's of those that were added with it."""

    def __init__(self, request: Request, listener: Listener, call_id: str) -> None:
        self.request = request
        self.listener = listener
        self.call_id = call_id
        self.tokens: list[int] = []
        self.wire_id: str | None = None  # its name in the running engine, if it is there
        self.admitted = False
