"""Questions that a chat model asks itself, so that a head learns from answers of every kind that it
gives: behind the opening of a user's turn it is left to write the turn (Magpie, arXiv 2406.08464).
A model whose template has no such turn begins texts instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import FinishReason, SamplingParams
from cbatch.engine.model_files import chat_template_of, tokenizer_of
from cbatch.llm import LLM

_MARK = "0123456789"  # where the question stands in a turn; no template has it
_TEMPERATURE, _TOP_P = 0.9, 0.98  # wilder ones ask in no language
_MOST_TOKENS = 96  # of a question, and what is longer is none
_BEGINNING_TOKENS = 12  # of a text


def ask_itself(model: str | Path, count: int, *, progress: bool = False) -> list[str]:
    """Different questions, at most `count`: the same ones in every call. Raises `FieldError` of
    `prompts` where the chat template does not show a question as it is."""
    tokenizer, template = tokenizer_of(model), chat_template_of(model)
    before, behind = "", ""
    if template is not None:
        turn = template.render([{"role": "user", "content": _MARK}])
        before, found, behind = turn.partition(_MARK)
        if not found:
            problem = "the chat template of this model hides what it is asked"
            raise FieldError("prompts", problem, "give a file of questions")
    opening = tokenizer.encode(before, add_special_tokens=not before) or tokenizer.encode("\n")
    ends = tuple(tokenizer.encode(behind, add_special_tokens=False)[:1])
    whole = FinishReason.STOP if ends else FinishReason.LENGTH
    settings: dict[str, Any] = {
        "temperature": _TEMPERATURE,
        "top_p": _TOP_P,
        "max_tokens": _MOST_TOKENS if ends else _BEGINNING_TOKENS,
        "stop_token_ids": ends,
    }
    params = [SamplingParams(seed=seed, **settings) for seed in range(count)]
    llm = LLM(model, lookahead="off", max_model_tokens=len(opening) + _MOST_TOKENS)
    answers = llm.generate([opening] * count, params, progress=progress)
    texts = [a.choices[0].text.strip() for a in answers if a.choices[0].finish_reason is whole]
    return [text for text in dict.fromkeys(texts) if text]
