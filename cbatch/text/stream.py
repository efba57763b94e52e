"""From the tokens of one sequence to the text to show, as they arrive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tokenizers.decoders import DecodeStream

from cbatch.text.stop import StopMatcher
from cbatch.text.tokenizer import TextTokenizer

# Some decoders drop the space of a sequence's first token. The end of the prompt goes first, so
# that the output's first token is not that one.
PRIMING_TOKENS = 6


class TextDelta(NamedTuple):
    """`text` may be shown now. `keep_tokens` is set when a stop string was completed: the number of
    output tokens up to the one that completed it. Later ones are no output."""

    text: str
    keep_tokens: int | None


class TextStream:
    """Incremental text of one sequence: whole UTF-8 characters only, cut before a stop string.

    What is shown, with `finish()` at the end, is the decoded output up to the stop string. Bytes
    that are no UTF-8 appear as U+FFFD once it is certain that they are none.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        prompt: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._matcher = StopMatcher(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._ids: list[int] = []  # what this run of the decoder took, the primed ones included
        self._num_chars = 0  # and the characters it gave
        for token_id in prompt[-PRIMING_TOKENS:]:
            self._step(token_id)
        self._ended = False

    def push(self, ids: Iterable[int]) -> TextDelta:
        """Takes the next output tokens. After a stop string nothing may be pushed."""
        if self._ended:
            raise RuntimeError("the sequence has ended")
        texts = [self._step(token_id) for token_id in ids]
        whole = "".join(texts)
        if not self._matcher.completes(whole):
            self._num_tokens += len(texts)
            return TextDelta(self._matcher.push(whole)[0], None)
        shown: list[str] = []
        for text in texts:
            self._num_tokens += 1
            part, stopped = self._matcher.push(text, may_stop=self._num_tokens >= self._min_tokens)
            shown.append(part)
            if stopped:
                self._ended = True
                return TextDelta("".join(shown), self._num_tokens)
        return TextDelta("".join(shown), None)

    def finish(self) -> str:
        """The end of the text, once no token can follow: what was held back as a possible stop
        string or as the beginning of a character. Empty after a stop string."""
        if self._ended:
            return ""
        self._ended = True
        tail = self._tokenizer.decode(self._ids)[self._num_chars :]
        shown, _ = self._matcher.push(tail, may_stop=False)
        return shown + self._matcher.flush()

    def _step(self, token_id: int) -> str:
        try:
            text = self._stream.step(self._tokenizer.raw, token_id) or ""
        except Exception:
            # Byte tokens that are no UTF-8 can change how earlier ones decode, and the library then
            # gives up. What was shown stands; decoding begins again at this token.
            self._stream = DecodeStream(skip_special_tokens=True)
            self._ids, self._num_chars = [], 0
            text = self._stream.step(self._tokenizer.raw, token_id) or ""
        self._ids.append(token_id)
        self._num_chars += len(text)
        return text
