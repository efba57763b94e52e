"""Places for system and developer messages. Many templates take one, at the start, and refuse or
drop others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

Message = Mapping[str, Any]
Messages = list[Message]


def is_instruction(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") in ("system", "developer")


def with_marks(messages: Sequence[Message]) -> Messages:
    """Return the messages with marks as their texts, to see which ones a template keeps."""
    return [
        {**message, "content": f"cbatchtext{at}end"} if message.get("content") else message
        for at, message in enumerate(messages)
    ]


def keeps_instructions(marked: Messages, text: str) -> bool:
    """Return True if `text`, rendered from messages with marks, has those of all instructions. A
    template that shows no message at all keeps what it is given."""
    texts = [(message, message["content"]) for message in marked if message.get("content")]
    lost = any(is_instruction(message) and mark not in text for message, mark in texts)
    return not lost or not any(mark in text for _, mark in texts)


def _merged(messages: Messages) -> Messages:
    """Merge the leading instructions."""
    leading = list(takewhile(is_instruction, messages))
    return [*_joined(leading), *messages[len(leading) :]]


def _folded(messages: Messages) -> Messages:
    """Put later instructions in the user's turn where they stand, so that what is before them stays
    in the prefix cache."""
    num_leading = len(list(takewhile(is_instruction, messages)))
    return [*_joined(messages[:num_leading]), *_in_user_turns(messages[num_leading:])]


def _in_user_turns(messages: Messages) -> Messages:
    """Make instructions text of the user, in one turn with the user's messages next to them."""
    turns: Messages = []
    follows_instruction = False
    for message in messages:
        instruction = is_instruction(message)
        if instruction:
            message = {"role": "user", "content": message.get("content")}
        joins = turns and message["role"] == turns[-1]["role"] == "user"
        if joins and (instruction or follows_instruction):
            turns[-1:] = _joined([turns[-1], message])
        else:
            turns.append(message)
        follows_instruction = instruction
    return turns


def _all_first(messages: Messages) -> Messages:
    """Merge all instructions at the start."""
    instructions = [message for message in messages if is_instruction(message)]
    others = [message for message in messages if not is_instruction(message)]
    return [*_joined(instructions), *others]


def _joined(messages: Messages) -> Messages:
    texts = [str(message["content"]) for message in messages if message.get("content")]
    return [{**messages[0], "content": "\n\n".join(texts)}] if messages else []


# In the order in which they are tried. The fourth is for templates without any instructions.
ARRANGEMENTS: tuple[Callable[[Messages], Messages], ...] = (
    list,
    _merged,
    _folded,
    _in_user_turns,
    _all_first,
)
