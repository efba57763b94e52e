"""Open sequences, as the engine client keeps them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from cbatch.core.request.logprobs import TokenLogprobs
from cbatch.core.request.output import OutputRow
from cbatch.core.request.request import Request


class OpenSequence(ABC):
    """One choice of a request, and what receives its events on the event loop. `request` and
    `tokens` are the transcript from which another engine resumes it. `EngineClient` sets all but
    `request`. No event follows the last row, or a cancel or finish by the owner. If a method
    raises, `on_failed` is called; no other sequence is affected."""

    request: Request
    tokens: list[int]  # emitted so far
    group: OpenSequence  # the first sequence that was added with it
    wire_id: str | None = None  # its id in the running engine, if it was sent there
    admitted = False

    @abstractmethod
    def on_admitted(self, ago_s: float) -> None:
        """Handle the slot that it got `ago_s` seconds ago. Called once, also if engines restart."""

    @abstractmethod
    def on_logprobs(self, entry: TokenLogprobs) -> None:
        """Handle log probabilities of the prompt, or of the tokens of the next `on_step`."""

    @abstractmethod
    def on_step(self, row: OutputRow) -> None:
        """Handle new tokens, which are in `tokens` already, and the end if the row has one."""

    @abstractmethod
    def on_lost(self, message: str) -> None:
        """Handle the loss of the engine for good."""

    @abstractmethod
    def on_failed(self, error: Exception) -> None:
        """Handle an error of this process or of another method. The sequence was dropped."""
