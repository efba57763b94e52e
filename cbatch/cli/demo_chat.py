"""Second half of `cbatch demo`: conversations with SmolLM2, if it is installed."""

from __future__ import annotations

from msgspec.structs import replace
from rich.console import Console
from rich.text import Text

from cbatch.cli.lanes import watch
from cbatch.cli.summary import BatchRun, print_summary
from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import MODEL, SamplingParams
from cbatch.engine.build import load_engine
from cbatch.engine.model_files import chat_template_of, find_model
from cbatch.engine.options import EngineOptions
from cbatch.llm import Batch
from cbatch.system.terminal import shown

NAME = "smollm2"  # name of the packaged model, for `find_model`
QUESTIONS = (
    "Why is the sky blue?",
    "How do plants make food?",
    "Give me three tips for sleeping well.",
    "Tell me about the moon.",
)
FOLLOW_UP = "Can you explain that to a child?"
DEFAULT_DRAFTER = ("ngram",)  # needs no draft model, which SmolLM2 lacks
FREQUENCY_PENALTY = 0.3  # without a penalty this small model repeats itself


def chat(
    options: EngineOptions, params: SamplingParams, console: Console, pace_s: float
) -> list[BatchRun]:
    """Run all conversations as one batch, two turns each, and print them.

    The second turn finds the first in the prefix cache. A step that is shown takes at least
    `pace_s` seconds. Returns a list with the run. If the model is not installed, prints the
    reason and returns an empty list."""
    console.print()
    console.rule(f"a chat with {NAME}", align="left")
    try:
        model = find_model(NAME)
    except FieldError as error:
        console.print(f"left out: {error}", soft_wrap=True)
        return []
    drafter = tuple(name for name in options.drafter or () if name != MODEL) or DEFAULT_DRAFTER
    options = replace(options, drafter=drafter, dtype="auto", max_model_len=1024)
    engine, info = load_engine(model, None, options)
    for line in info.lines():
        console.print(line, soft_wrap=True)
    template = chat_template_of(model)
    assert template is not None
    params = replace(params, frequency_penalty=FREQUENCY_PENALTY)
    conversations = {each: [{"role": "user", "content": each}] for each in QUESTIONS}
    titles = {question: question for question in QUESTIONS}
    num_errors, elapsed_s = 0, 0.0
    for turn in range(2):
        batch: Batch[str] = Batch(engine)
        for question, messages in conversations.items():
            if turn:
                messages.append({"role": "user", "content": FOLLOW_UP})
            batch.add(question, template.render(messages), params)
        done, spent_s = watch(engine, batch, titles, console, len(titles), pace_s)
        elapsed_s += spent_s
        for question, completion in done.items():
            num_errors += completion.error is not None
            conversations[question].append({"role": "assistant", "content": completion.text})
    for question, messages in conversations.items():
        console.rule(question, align="left", style="dim")
        for message in messages[1:]:
            is_question = message["role"] == "user"
            for line in message["content"].strip().split("\n"):
                bar = Text("" if is_question else "│ ", style="green")
                style = "dim" if is_question else ""
                console.print(bar + Text(shown(line, console.file), style=style), soft_wrap=True)
    run = BatchRun(
        info=info,
        stats=engine.stats,
        batch=min(options.max_num_seqs, len(conversations)),
        num_requests=2 * len(conversations),
        num_errors=num_errors,
        elapsed_s=elapsed_s,
    )
    print_summary(run, console)
    stats = engine.scheduler.stats
    share = stats.prefix_hit_tokens / stats.prompt_tokens
    console.print(f"{share:.0%} of the prompt tokens were found in the prefix cache")
    return [run]
