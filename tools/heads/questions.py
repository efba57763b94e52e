"""Questions written by a chat model itself, so that a head learns from all kinds of its answers.
The model continues the opening of a user turn (Magpie, arXiv 2406.08464). A model without a chat
template writes beginnings of texts instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import FinishReason, SamplingParams
from cbatch.engine.model_files import chat_template_of, tokenizer_of
from cbatch.llm import LLM

_MARK = "0123456789"  # marks the place of the question in a rendered turn; no template has it.
_TEMPERATURE, _TOP_P = 0.9, 0.98  # higher values give questions in no language.
_MAX_TOKENS = 96  # limit of a question; a longer text is discarded.
_BEGINNING_TOKENS = 12  # length of the beginning of a text.


def ask_itself(model: str | Path, count: int, *, progress: bool = False) -> list[str]:
    """Return up to `count` distinct questions, the same in every call. Raises `FieldError` for
    `prompts` if the rendered chat template does not contain the question unchanged."""
    tokenizer, template = tokenizer_of(model), chat_template_of(model)
    before, after = "", ""
    if template is not None:
        turn = template.render([{"role": "user", "content": _MARK}])
        before, mark, after = turn.partition(_MARK)
        if not mark:
            problem = "the chat template of this model hides the question"
            raise FieldError("prompts", problem, "give a file of questions")
    opening = tokenizer.encode(before, add_special_tokens=not before) or tokenizer.encode("\n")
    ends = tuple(tokenizer.encode(after, add_special_tokens=False)[:1])
    complete = FinishReason.STOP if ends else FinishReason.LENGTH
    settings: dict[str, Any] = {
        "temperature": _TEMPERATURE,
        "top_p": _TOP_P,
        "max_tokens": _MAX_TOKENS if ends else _BEGINNING_TOKENS,
        "stop_token_ids": ends,
    }
    params = [SamplingParams(seed=seed, **settings) for seed in range(count)]
    llm = LLM(model, lookahead="off", max_model_len=len(opening) + _MAX_TOKENS)
    answers = llm.generate([opening] * count, params, progress=progress)
    texts = [a.choices[0].text.strip() for a in answers if a.choices[0].finish_reason is complete]
    return [text for text in dict.fromkeys(texts) if text]
