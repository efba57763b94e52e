"""Open sequences, as the engine client keeps them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from cbatch.core.request.logprobs import TokenLogprobs
from cbatch.core.request.output import OutputRow
from cbatch.core.request.request import Request


class OpenSequence(ABC):
    """One choice of a request, and the handlers of its events on the event loop. `request` and
    `tokens` are the transcript from which another engine resumes the choice. `EngineClient` sets
    all attributes except `request`. No event follows the last row, or a cancel or finish by the
    owner. If a handler raises, `on_failed` is called; no other sequence is affected."""

    request: Request
    tokens: list[int]  # emitted so far
    group: OpenSequence  # first sequence of the group
    wire_id: str | None = None  # id in the running engine, if it has the sequence
    admitted = False

    @abstractmethod
    def on_admitted(self, ago_s: float, cached_tokens: int) -> None:
        """Handle the admission to a slot `ago_s` seconds ago, with `cached_tokens` of the prompt in
        the prefix cache. Called once, even after restarts."""

    @abstractmethod
    def on_logprobs(self, entry: TokenLogprobs) -> None:
        """Handle log probabilities of the prompt, or of the tokens of the next `on_step`."""

    @abstractmethod
    def on_step(self, row: OutputRow) -> None:
        """Handle new tokens, which are in `tokens` already, and the finish reason, if any."""

    @abstractmethod
    def on_lost(self, message: str) -> None:
        """Handle the loss of the engine for good."""

    @abstractmethod
    def on_failed(self, error: Exception) -> None:
        """Handle an error of this process or of another handler. The sequence was dropped."""
