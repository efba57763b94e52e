"""Places for system and developer messages. Many templates take one, at the start, and refuse or
drop others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

Message = Mapping[str, Any]
Messages = list[Message]
# A place must allow the next turn as well, so that a prompt begins with the one of the turn before.
_NEXT_TURN: Messages = [{"role": role, "content": "x"} for role in ("assistant", "user")]
_MARK = re.compile(r"(?:instruction|othertext)\d+end")
_LONG_CHARS = 16  # a message of this length is not in a rendered text by chance


def is_instruction(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") in ("system", "developer")


def arrangements(messages: Messages) -> Iterator[tuple[Messages, list[Messages]]]:
    following = _NEXT_TURN[messages[-1]["role"] == "assistant" :]
    marked: Messages = [
        {**each, "content": f"{'instruction' if is_instruction(each) else 'othertext'}{at}end"}
        if each.get("content")
        else each
        for at, each in enumerate([*messages, *following])
    ]
    for tests in ([marked[: len(messages)], marked], [marked[: len(messages)]]):
        tried: list[Messages] = []
        for arrange in _ARRANGEMENTS:
            arranged = arrange(messages)
            if arranged not in tried:
                tried.append(arranged)
                yield arranged, list(map(arrange, tests))


def plainly_keeps(messages: Sequence[Message], text: str) -> bool:
    """Return True if the only instruction is the first message, is long, and is in the text."""
    first = str(messages[0].get("content")).strip()
    single = is_instruction(messages[0]) and sum(map(is_instruction, messages)) == 1
    return single and len(first) >= _LONG_CHARS and first in text


def keeps_instructions(marked: Sequence[Message], text: str) -> bool:
    """Return True if `text`, rendered from a test conversation, has all its instructions, or shows
    no message at all."""
    sent = set(_MARK.findall(str([message.get("content") for message in marked])))
    shown = sent.intersection(_MARK.findall(text))
    return not shown or all(mark in shown for mark in sent if mark.startswith("instruction"))


def _merged(messages: Messages) -> Messages:
    leading = list(takewhile(is_instruction, messages))
    return [*_joined(leading), *messages[len(leading) :]]


def _folded(messages: Messages) -> Messages:
    """Put later instructions in the user's turns at their places, so that what is before them stays
    in the prefix cache."""
    merged = _merged(messages)
    first = merged[: is_instruction(merged[0])]
    return [*first, *_in_user_turns(merged[len(first) :])]


def _in_user_turns(messages: Messages) -> Messages:
    """Make instructions text of the user, in one turn with the user's messages next to them."""
    turns: list[Messages] = []
    follows_instruction = False
    for message in messages:
        instruction = is_instruction(message)
        if instruction:
            message = {"role": "user", "content": message.get("content")}
        joins = turns and message["role"] == turns[-1][0]["role"] == "user"
        if joins and (instruction or follows_instruction):
            turns[-1].append(message)
        else:
            turns.append([message])
        follows_instruction = instruction
    return [message for turn in turns for message in (_joined(turn) if turn[1:] else turn)]


def _joined(messages: Messages) -> Messages:
    texts = [str(message["content"]) for message in messages if message.get("content")]
    return [{**messages[0], "content": "\n\n".join(texts)}] if messages else []


_first = partial(sorted, key=lambda message: not is_instruction(message))
_ARRANGEMENTS: tuple[Callable[[Messages], Messages], ...] = (
    list,
    _merged,
    _folded,
    _in_user_turns,
    lambda messages: _merged(_first(messages)),
    lambda messages: _in_user_turns(_first(messages)),
)
