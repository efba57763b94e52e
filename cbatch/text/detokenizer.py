"""Incremental decoding of one sequence's tokens, up to a stop string."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tokenizers.decoders import DecodeStream

from cbatch.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from cbatch.core.request.request import SamplingParams

# Some decoders drop the space of a sequence's first token. Decoding therefore starts with this many
# tokens from the end of the prompt.
PRIMING_TOKENS = 6
PRIMING_WINDOW_TOKENS = 64  # prompt tokens, from the end, among which the priming tokens are chosen
MAX_CHARACTER_TOKENS = 4  # byte tokens in one UTF-8 character
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
# Placeholders for special tokens that are hidden but part of a stop string. They are surrogates,
# which no decoded text contains.
_MARKS = range(0xD800, 0xE000)
_UNMARKED = dict.fromkeys(_MARKS)
# Tokens that have yielded no text are decoded again with each new token, up to this many tokens.
# A character has fewer tokens.
MAX_PENDING_TOKENS = 32


class TextDelta(NamedTuple):
    """`text` may be shown now. `keep_tokens` is None, or, if a stop string was completed, the
    number of output tokens up to the one that completed the stop string."""

    text: str
    keep_tokens: int | None


class TextStream:
    """Incremental text of one sequence: whole UTF-8 characters only, up to a stop string.

    The texts from `push` and `finish` join to the decoded output before the stop string. Invalid
    UTF-8 becomes U+FFFD once no token can complete it. A character that is incomplete at the end is
    not shown. A character that begins in the prompt is shown whole.

    `texts` holds the decoded text of each token of the last `push`, ignoring stop strings; `tail`
    is the text that `finish` decoded. The special tokens `mark_ids` are decoded as text. If
    `mark_ids` is given, `pieces` holds the text to show for each token of the last `push`.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        params: SamplingParams,
        prompt: Sequence[int] = (),
        *,
        mark_ids: frozenset[int] | None = None,
    ) -> None:
        self.texts: list[str] = []
        self.pieces: list[str] = []
        self.tail = ""
        self._tokenizer = tokenizer
        self._wants_pieces = mark_ids is not None
        self._skips_special = params.skip_special_tokens and not mark_ids
        self._spaces = params.skip_special_tokens or params.spaces_between_special_tokens
        self._hidden: frozenset[int] = frozenset()
        if params.skip_special_tokens:
            self._hidden = tokenizer.special_ids - (mark_ids or frozenset())
        added, stops = tokenizer.added, params.stop
        named = (i for i in sorted(self._hidden) if any(added[i] in stop for stop in stops))
        self._marks = {i: chr(mark) for i, mark in zip(named, _MARKS, strict=False)}
        names = {added[i]: mark for i, mark in self._marks.items()}
        self._matcher = StopMatcher(stops, names, include=params.include_stop_str_in_output)
        self._stream = self._new_stream()
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._pending: list[int] = []  # tokens that have yielded no text yet
        self._prompt_tail = ""  # text of the prompt's pending tokens, to cut from the output
        self._after_added = False
        self._prime(prompt)
        self._ended = False

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._matcher.completed

    def push(self, ids: Iterable[int]) -> TextDelta:
        """Decode the next output tokens. Raises RuntimeError after a stop string or `finish`."""
        if self._ended:
            raise RuntimeError("the sequence has ended")
        texts = [self._step(token_id) for token_id in ids]
        self.texts = [self._unmarked(text) for text in texts] if self._marks else texts
        whole = "".join(texts)
        if not self._wants_pieces and not self._matcher.completes(whole):
            self._num_tokens += len(texts)
            return TextDelta(self._unmarked(self._matcher.push(whole)[0]), None)
        self.pieces = []
        for text in texts:
            self._num_tokens += 1
            part, stopped = self._matcher.push(text, may_stop=self._num_tokens >= self._min_tokens)
            self.pieces.append(self._unmarked(part))
            if stopped:
                self._ended = True
                return TextDelta("".join(self.pieces), self._num_tokens)
        return TextDelta("".join(self.pieces), None)

    def finish(self) -> str:
        """Return the text that was held back as a possible stop string or part of a character, when
        the output ends. Empty after a stop string."""
        if self._ended:
            return ""
        self._ended = True
        self.tail = self._without_prompt_tail(self._whole_characters())
        shown, _ = self._matcher.push(self.tail, may_stop=False)
        return self._unmarked(shown + self._matcher.flush())

    def _whole_characters(self) -> str:
        text, decoder = self._decoded(self._pending), _Utf8Decoder("replace")
        decoder.decode(b"".join(map(self._tokenizer.token_bytes, self._pending)))
        incomplete = len(decoder.getstate()[0])
        if incomplete and self._tokenizer.byte_level:
            incomplete = 1  # all bytes decode to one U+FFFD
        return text[: len(text) - incomplete]

    def _unmarked(self, text: str) -> str:
        return text.translate(_UNMARKED) if self._marks else text

    def _decoded(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skips_special)

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(skip_special_tokens=self._skips_special)

    def _prime(self, prompt: Sequence[int]) -> None:
        """Decode the end of the prompt, without special tokens."""
        special_ids = self._tokenizer.special_ids
        near = [i for i in prompt[-PRIMING_WINDOW_TOKENS:] if i not in special_ids]
        start = self._character_start(near, len(near) - PRIMING_TOKENS)
        for token_id in near[start:]:
            self._step(token_id)
        self._prompt_tail = self._decoded(self._pending)

    def _character_start(self, ids: Sequence[int], at: int) -> int:
        """Return `at`, or the index of the token that begins the character at `at`. Decoding from
        within a character would yield U+FFFD for it and for all byte tokens after it."""
        first = max(at - MAX_CHARACTER_TOKENS + 1, 0)
        starts = (i for i in range(at, first - 1, -1) if not self._tokenizer.continues(ids[i]))
        return next(starts, max(at, 0))

    def _step(self, token_id: int) -> str:
        if token_id in self._hidden:
            return self._marks.get(token_id, "")
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer.raw, token_id) or ""
        except Exception:
            # An invalid byte token can change how earlier tokens decode; the library then raises.
            # The text shown so far is kept, and decoding starts again at this token.
            text = self._decoded(self._pending)
            self._stream = self._new_stream()
            self._stream.step(self._tokenizer.raw, token_id)
        if not text and len(self._pending) > MAX_PENDING_TOKENS:
            return self._flush_pending()
        if text:
            self._pending = []
        if not self._spaces:
            added, followed = self._tokenizer.added.get(token_id), self._after_added
            self._after_added = added is not None
            text = added if added is not None and followed else text
        return self._without_prompt_tail(text) if self._prompt_tail else text

    def _flush_pending(self) -> str:
        """Return the pending tokens as text, except a last character that may be incomplete."""
        at = self._character_start(self._pending, len(self._pending) - 1)
        text, rest = self._decoded(self._pending[:at]), self._pending[at:]
        self._stream, self._pending = self._new_stream(), []
        return self._without_prompt_tail(text) + "".join(map(self._step, rest))

    def _without_prompt_tail(self, text: str) -> str:
        if not text:
            return ""
        tail, self._prompt_tail = self._prompt_tail, ""
        return text.removeprefix(tail)


class StopMatcher:
    """Find the stop string that is completed first, however the text is split into pieces. Text
    that may be the start of a stop string is held back.

    If one character completes several stop strings, the longest counts. It is cut from the text
    unless `include` is set. `marks` maps parts of stop strings to placeholder characters in the
    text.
    """

    def __init__(
        self, stops: Sequence[str], marks: Mapping[str, str] | None = None, *, include: bool = False
    ) -> None:
        marks = marks or {}
        parts = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))
        marked = {parts.sub(lambda part: marks.get(part[0], ""), stop): stop for stop in stops}
        shown = dict(zip(stops, stops, strict=True)) | marked  # stop strings by searched form
        self.completed: str | None = None  # the stop string that ended the text
        self._forms, self._include = shown, include
        self._stops = tuple(shown)
        self._beginnings = frozenset(s[:n] for s in self._stops for n in range(1, len(s)))
        self._longest = max(map(len, self._beginnings), default=0)
        self._last_characters = frozenset(b[-1] for b in self._beginnings)
        self._buffer = ""

    def completes(self, text: str) -> bool:
        """Return whether `text` would complete a stop string if it came next."""
        buffer = self._buffer + text if self._buffer else text
        return any(stop in buffer for stop in self._stops)

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """Return the text to show, and whether a stop string was completed. With `may_stop=False`,
        as for `min_tokens`, a stop string completed here is ordinary text. A stop string that only
        begins here still counts."""
        if not self._stops:
            return text, False
        buffer = self._buffer + text
        match = self._match(buffer) if may_stop else None
        if match is not None:
            self._buffer = ""
            _, start, form = match
            self.completed = self._forms[form]
            return buffer[:start] + (self.completed if self._include else ""), True
        cut = len(buffer) - self._partial(buffer)
        self._buffer = buffer[cut:]
        return buffer[:cut], False

    def flush(self) -> str:
        rest, self._buffer = self._buffer, ""
        return rest

    def _match(self, buffer: str) -> tuple[int, int, str] | None:
        """Return (end, start, stop string) of the match that ends first."""
        matches = [(at + len(s), at, s) for s in self._stops if (at := buffer.find(s)) >= 0]
        return min(matches, default=None)

    def _partial(self, buffer: str) -> int:
        """Return the length of the longest suffix of `buffer` that begins a stop string."""
        if not buffer or buffer[-1] not in self._last_characters:
            return 0
        for length in range(min(self._longest, len(buffer)), 0, -1):
            if buffer[-length:] in self._beginnings:
                return length
        return 0
