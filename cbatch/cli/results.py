"""Result lines of `cbatch generate`: one JSON object per prompt."""

from __future__ import annotations

from typing import Any

from cbatch.cli.jobs import Job
from cbatch.text.outputs import Choice, Completion, Speculation, TokenLogprob


def result_line(job: Job, completion: Completion) -> dict[str, Any]:
    """Return the JSON object of a prompt's result. Its `prompt`, `params` and `seed` are enough to
    generate the same text again."""
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
            name: [_logprob(each) for each in logprobs]
            for name, logprobs in (
                ("logprobs", choice.logprobs),
                ("prompt_logprobs", choice.prompt_logprobs),
            )
            if logprobs is not None
        },
    }


def _logprob(logprob: TokenLogprob | None) -> dict[str, Any] | None:
    if logprob is None:
        return None
    return {
        "token_id": logprob.token_id,
        "logprob": logprob.logprob,
        "top": [{"token_id": i, "logprob": value} for i, value in logprob.top],
    }


def _speculation(speculation: Speculation) -> dict[str, Any]:
    return {
        "steps": speculation.steps,
        "drafted_tokens": speculation.drafted_tokens,
        "accepted_tokens": speculation.accepted_tokens,
        "mean_accepted_tokens": speculation.mean_accepted_tokens,
    }
