"""The results of `cbatch generate`: a line of JSON for each prompt."""

from __future__ import annotations

from typing import Any

from cbatch.cli.jobs import Job
from cbatch.text.outputs import Choice, Completion, Speculation, TokenLogprob


def result_line(job: Job, completion: Completion) -> dict[str, Any]:
    """What is written for a prompt. With `seed` and `params` it can be generated again."""
    line: dict[str, Any] = {"index": job.index}
    if job.name is not None:
        line["id"] = job.name
    line |= {"prompt": job.prompt, "params": job.params_json(), "seed": completion.seed}
    line["choices"] = [_choice(c) for c in completion.choices]
    place = "" if job.line is None else f"line {job.line}: "
    line["error"] = None if completion.error is None else place + completion.error
    return line


def _choice(choice: Choice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": choice.finish_reason.value,
        "error": choice.error,
        "speculation": _speculation(choice.speculation),
        **{
            name: [_logprob(each) for each in asked_for]
            for name, asked_for in (
                ("logprobs", choice.logprobs),
                ("prompt_logprobs", choice.prompt_logprobs),
            )
            if asked_for is not None
        },
    }


def _logprob(found: TokenLogprob | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "token_id": found.token_id,
        "logprob": found.logprob,
        "top": [{"token_id": i, "logprob": value} for i, value in found.top],
    }


def _speculation(speculation: Speculation) -> dict[str, Any]:
    return {
        "steps": speculation.steps,
        "drafted_tokens": speculation.drafted_tokens,
        "accepted_tokens": speculation.accepted_tokens,
        "mean_accepted_tokens": speculation.mean_accepted_tokens,
    }
