"""The grammar of a reply with a structured answer after an unstructured thought."""

from __future__ import annotations

import json
import re
from itertools import groupby

from cbatch.text import TextTokenizer
from cbatch.text.reply_reader import ThoughtFormat

_TOKENS_IN_MARKS = re.compile(r"(<[^<>]+>|\[[^][]+\])")


def surrounding_grammar(
    thoughts: ThoughtFormat, tokenizer: TextTokenizer, prompt_end: str
) -> str | None:
    """Return the Lark grammar of the whole reply, in which `@answer` is the structured part. Return
    None if the prompt already closes the thought, so that the whole reply is the answer.

    A thought is any text up to its closing mark. It must not contain control tokens such as EOS,
    since an answer has to follow.
    """
    if prompt_end.rstrip().endswith(thoughts.close_mark):
        return None
    added = {text: token_id for token_id, text in tokenizer.added.items()}
    excluded_ids = tokenizer.special_ids | {added.get(thoughts.close_mark)}
    allowed_ids = sorted(i for i in added.values() if i not in excluded_ids)
    others = f"(text? <[{_ranges(allowed_ids)}]>)* " if allowed_ids else ""
    token = f"text? <[{added[thoughts.close_mark]}]> | " if thoughts.close_mark in added else ""
    closing = re.escape(thoughts.close_mark).replace("/", r"\/")
    gap = _mark(thoughts.prompt_end, added) if thoughts.anywhere else r"/\n{0,2}/"
    thought = f"thought {gap}"
    if not thoughts.reply_starts_inside(prompt_end):
        thought = f"({_mark(thoughts.open_mark, added)} {thought})?"
    return "\n".join(
        (
            f"start: {thought} {_mark(thoughts.answer_mark, added)} @answer",
            f"thought: {others}({token}last)",
            "text: /(?s:.+)/",
            f"last[lazy]: /(?s:.*){closing}/",
        )
    )


def _ranges(ids: list[int]) -> str:
    """Return sorted ids as ranges in Lark, since tokenizers may have thousands of added tokens."""
    runs = [list(run) for _, run in groupby(enumerate(ids), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0][1]}-{run[-1][1]}" for run in runs)


def _mark(text: str, added: dict[str, int]) -> str:
    """Return a Lark expression for a text. An added token in it may also be written as text."""
    parts = [part for part in _TOKENS_IN_MARKS.split(text) if part]
    return " ".join(
        f"({json.dumps(part)} | <[{added[part]}]>)" if part in added else json.dumps(part)
        for part in parts
    )
