"""`uniqueItems` for lists of strings, which no grammar can express."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

ForbidRepeats = Callable[[NDArray[np.bool_], list[int], Callable[[int], bool]], None]
_STRING = rb'"(?:[^"\\]|\\.)*"'
_SEPARATORS = b", \t\r\n"
_WHOLE_ITEM = re.compile(rb',\s*"[^"]*"')
_MAX_TRIED_TOKENS = 64  # if more tokens are allowed, they are not tried one by one
_MAX_CACHED_TRIALS = 1000


class UniqueItems:
    """A filter of tokens. `names` are properties with unique lists, `words` the tokens' texts."""

    def __init__(self, names: Sequence[str], words: Sequence[bytes]) -> None:
        keys = (re.escape(json.dumps(name, ensure_ascii=False).encode()) for name in names)
        begin = rb"(?:%s)\s*:\s*\[\s*((?:%s\s*,\s*)*)" % (b"|".join(keys), _STRING)
        self._open_list = re.compile(begin + rb'("(?:[^"\\]|\\.)*\\?"?|)\s*$')
        self._words = words
        self._closing = np.array([i for i, word in enumerate(words) if b'"' in word], dtype=int)
        self._tried: dict[bytes, bool] = {}  # whether any token may follow, by text

    def forbid(
        self, allowed: NDArray[np.bool_], taken: list[int], can_continue: Callable[[int], bool]
    ) -> None:
        """Remove the tokens from `allowed` that would repeat an item of the list at the end of the
        text of the tokens `taken`. If at most `_MAX_TRIED_TOKENS` are allowed, also remove tokens
        after which only repeats are possible: `can_continue` returns whether any token may follow
        a token."""
        text = b"".join(self._words[token] for token in taken)
        match = self._open_list.search(text)
        if match is None:
            return
        items, partial = re.findall(_STRING, match[1]), match[2]
        if re.fullmatch(_STRING, partial):
            items, partial = [*items, partial], b""
        rests = tuple(item[len(partial) :] for item in items if item.startswith(partial))
        tries_all = np.count_nonzero(allowed) <= _MAX_TRIED_TOKENS
        tokens = np.flatnonzero(allowed) if tries_all else self._closing[allowed[self._closing]]
        blanks = [token for token in tokens.tolist() if not self._words[token].strip()]
        others = [token for token in tokens.tolist() if self._words[token].strip()]
        for token in others:
            word = self._words[token] if partial else self._words[token].lstrip(_SEPARATORS)
            if word.startswith(rests) or _WHOLE_ITEM.search(self._words[token]):
                allowed[token] = False
            elif tries_all and (b'"' in word or any(rest.startswith(word) for rest in rests)):
                longer = text + self._words[token]
                if longer not in self._tried:
                    if len(self._tried) > _MAX_CACHED_TRIALS:
                        self._tried.clear()
                    self._tried[longer] = can_continue(token)
                allowed[token] = self._tried[longer]
        if others and not allowed[others].any():
            allowed[blanks] = False
