"""From the tokens of one sequence to the text to show, as they arrive, up to a stop string."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tokenizers.decoders import DecodeStream

from cbatch.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from cbatch.core.request.request import SamplingParams

# Some decoders drop the space of a sequence's first token. The end of the prompt goes first, so
# that the output's first token is not that one.
PRIMING_TOKENS = 6
PRIMING_WINDOW_TOKENS = 64  # where they are looked for
MAX_CHARACTER_TOKENS = 4  # of bytes
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
# A special token that is not shown and that a stop string holds is one of these characters in the
# text that is searched: no decoded text has them.
_MARKS = range(0xD800, 0xE000)
_UNMARKED = dict.fromkeys(_MARKS)
# Tokens that make no text yet are decoded again with each that follows; so many are no character.
MAX_HELD_TOKENS = 32


class TextDelta(NamedTuple):
    """`text` may be shown now. `keep_tokens` is set when a stop string was completed: the number of
    output tokens up to the one that completed it. Later ones are no output."""

    text: str
    keep_tokens: int | None


class TextStream:
    """Incremental text of one sequence: whole UTF-8 characters only, up to a stop string.

    The text shown, with `finish()` at the end, is the decoded output up to the stop string. Invalid
    UTF-8 appears as U+FFFD once no token can complete it; a character that the output leaves
    incomplete is not shown. A character that the prompt begins and the output completes is shown
    whole. `texts` has what each token of the last `push` added before stop strings were looked for,
    `tail` what `finish` added to that. With `mark_ids` these special tokens are text like any
    other, and `pieces` has what each token of the last `push` lets be shown.
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
        self._in_pieces = mark_ids is not None
        self._skips = params.skip_special_tokens and not mark_ids
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
        self._held: list[int] = []  # tokens that the decoder took and has given no text for
        self._open = ""  # what the prompt's own among them are where no output completes them
        self._after_added = False
        self._prime(prompt)
        self._ended = False

    def push(self, ids: Iterable[int]) -> TextDelta:
        """Takes the next output tokens. After a stop string nothing may be pushed."""
        if self._ended:
            raise RuntimeError("the sequence has ended")
        texts = [self._step(token_id) for token_id in ids]
        self.texts = [self._unmarked(text) for text in texts] if self._marks else texts
        whole = "".join(texts)
        if not self._in_pieces and not self._matcher.completes(whole):
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
        """Return the end of the text, once no token can follow: what was held back as a possible
        stop string, or together with the beginning of a character. Empty after a stop string."""
        if self._ended:
            return ""
        self._ended = True
        self.tail = self._without_open(self._whole_characters())
        shown, _ = self._matcher.push(self.tail, may_stop=False)
        return self._unmarked(shown + self._matcher.flush())

    def _whole_characters(self) -> str:
        """Return the text of the held tokens, without a character that they leave incomplete."""
        text, decoder = self._decoded(self._held), _Utf8Decoder("replace")
        decoder.decode(b"".join(map(self._tokenizer.token_bytes, self._held)))
        incomplete = len(decoder.getstate()[0])
        if incomplete and self._tokenizer.byte_level:
            incomplete = 1  # one U+FFFD for all of its bytes
        return text[: len(text) - incomplete]

    def _unmarked(self, text: str) -> str:
        return text.translate(_UNMARKED) if self._marks else text

    def _decoded(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skips)

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(skip_special_tokens=self._skips)

    def _prime(self, prompt: Sequence[int]) -> None:
        """Takes the end of the prompt, without control tokens, which no text comes of."""
        special_ids = self._tokenizer.special_ids
        near = [i for i in prompt[-PRIMING_WINDOW_TOKENS:] if i not in special_ids]
        start = self._character_start(near, len(near) - PRIMING_TOKENS)
        for token_id in near[start:]:
            self._step(token_id)
        self._open = self._decoded(self._held)

    def _character_start(self, ids: Sequence[int], at: int) -> int:
        """`at`, or the few tokens before it that its character begins with. Cut in half it would be
        U+FFFD, and with byte tokens so would all be that stand behind it."""
        first = max(at - MAX_CHARACTER_TOKENS + 1, 0)
        starts = (i for i in range(at, first - 1, -1) if not self._tokenizer.continues(ids[i]))
        return next(starts, max(at, 0))

    def _step(self, token_id: int) -> str:
        if token_id in self._hidden:
            return self._marks.get(token_id, "")
        self._held.append(token_id)
        try:
            text = self._stream.step(self._tokenizer.raw, token_id) or ""
        except Exception:
            # Byte tokens that are no UTF-8 can change how earlier ones decode, and the library then
            # gives up. What was shown stands; decoding begins again at this token.
            text = self._decoded(self._held)
            self._stream = self._new_stream()
            self._stream.step(self._tokenizer.raw, token_id)
        if not text and len(self._held) > MAX_HELD_TOKENS:
            return self._give_up_held()
        if text:
            self._held = []
        if not self._spaces:
            added, followed = self._tokenizer.added.get(token_id), self._after_added
            self._after_added = added is not None
            text = added if added is not None and followed else text
        return self._without_open(text) if self._open else text

    def _give_up_held(self) -> str:
        """Shows what it is as yet, but for a last character that may not be whole."""
        at = self._character_start(self._held, len(self._held) - 1)
        text, rest = self._decoded(self._held[:at]), self._held[at:]
        self._stream, self._held = self._new_stream(), []
        return self._without_open(text) + "".join(map(self._step, rest))

    def _without_open(self, text: str) -> str:
        if not text:
            return ""
        opened, self._open = self._open, ""
        return text.removeprefix(opened)


class StopMatcher:
    """Finds the stop string that is completed first; its result does not depend on how the text
    is cut into pieces. Text that may yet become a stop string is held back.

    Of several stop strings completed by the same character the longest counts, so that nothing of
    it is shown, unless `include` asks for the stop string. `marks` are characters that may be in
    the place of a part of a stop string, by that part.
    """

    def __init__(
        self, stops: Sequence[str], marks: Mapping[str, str] | None = None, *, include: bool = False
    ) -> None:
        marks = marks or {}
        parts = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))
        marked = {parts.sub(lambda part: marks.get(part[0], ""), stop): stop for stop in stops}
        shown = dict(zip(stops, stops, strict=True)) | marked  # by what is looked for
        self._shown = {form: stop if include else "" for form, stop in shown.items()}
        self._stops = tuple(shown)
        self._beginnings = frozenset(s[:n] for s in self._stops for n in range(1, len(s)))
        self._longest = max(map(len, self._beginnings), default=0)
        self._last_characters = frozenset(b[-1] for b in self._beginnings)
        self._held = ""

    def completes(self, text: str) -> bool:
        """Whether `text` would complete a stop string, if it came next."""
        buffer = self._held + text if self._held else text
        return any(stop in buffer for stop in self._stops)

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """(text to show, whether a stop string was completed). With `may_stop` False a stop string
        completed here is text like any other (`min_tokens`), but one begun here still counts
        later."""
        if not self._stops:
            return text, False
        buffer = self._held + text
        match = self._match(buffer) if may_stop else None
        if match is not None:
            self._held = ""
            _, start, stop = match
            return buffer[:start] + self._shown[stop], True
        cut = len(buffer) - self._partial(buffer)
        self._held = buffer[cut:]
        return buffer[:cut], False

    def flush(self) -> str:
        """What was held back, once no more text can come."""
        held, self._held = self._held, ""
        return held

    def _match(self, buffer: str) -> tuple[int, int, str] | None:
        """Return (end, start, stop string) of the first that is complete."""
        matches = [(at + len(s), at, s) for s in self._stops if (at := buffer.find(s)) >= 0]
        return min(matches, default=None)

    def _partial(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that begins a stop string."""
        if not buffer or buffer[-1] not in self._last_characters:
            return 0
        for length in range(min(self._longest, len(buffer)), 0, -1):
            if buffer[-length:] in self._beginnings:
                return length
        return 0
