"""The model card, rendered from the figures of the run it describes."""

from __future__ import annotations

import textwrap

from tools.demo_pair.data import HELD_OUT_MODULES
from tools.demo_pair.evaluate import LOOKAHEAD, speedup
from tools.demo_pair.nets import DRAFT, TARGET, Llama, NetConfig

CARD = """# The demo pair

Two small language models of Python that make every command work offline: a target, and a draft
distilled from it. Trained by `python -m tools.demo_pair.train`, which needs nothing but the
Python standard library of the interpreter that runs it. They exist to exercise the engine, not to
help anyone program.

| | parameters | layers | hidden | heads (KV) | intermediate | vocabulary | context |
|---|---|---|---|---|---|---|---|
{shapes}

Llama-shaped, tied embeddings, bf16 safetensors in Hugging Face folders (`target/`, `draft/`),
{size_mb:.1f} MB together. The tokenizer is a byte-level BPE, exact for any UTF-8; a line break and
the indentation after it form one token.

## Data
{data}

Held out, whole modules (and their tests):
{held_out}.

Files are cut into functions, methods and the text between; a chunk is dropped when at least 70 % of
its runs of three normalised lines were seen before (chunks under five lines are kept). Held-out
modules are read first, so what nearly copies them is not trained on.

## Training
{training}

The target learns its first half with 4 layers; each is then followed by two copies of itself whose
output projections are zero, so that the function stays the same while the depth becomes 12. Its
context grows from 128 to 256 to 512 tokens, and its learning rate falls to zero over the last 30 %.
The draft's embedding starts as a projection of an unfinished target's, and its text stage can run
during the target's training. The minutes are those of a CPU of two cores that did other work at the
same time; how many steps fit depends on that, so another run gives other weights.

## Held-out figures
Loss is over every token of the module. Acceptance is greedy: the target continues function heads
(signature and docstring) of the module by up to 96 tokens, and the draft, fed the same tokens, is
asked for each next one. Tokens per step: k = {lookahead} fixed. The target repeats itself when it
decodes greedily, and repetitions are easy to draft; the column "fresh" is the acceptance at tokens
that do not complete a run of four seen before in the same continuation
({fresh_share:.0%} of the tokens).

| module | tokens | nats/token | bits/byte | prompts | acceptance | fresh | tokens per step |
|---|---|---|---|---|---|---|---|
{figures}

## Cost ratio
Plain torch, fp32, batch 1, 128 tokens of context, 2 threads, best of 200, on a machine
that did other work ({machine}):
target {target_1_ms:.2f} ms for 1 row, {target_5_ms:.2f} ms for 5, {target_8_ms:.2f} ms for 8;
draft {draft_1_ms:.2f} ms, which is c = {c:.3f} of a verification step of 5 rows. At k = {lookahead}
these figures and the acceptance above give {speedup:.2f}x plain decoding, before the engine's own
overhead. Depth is what costs at this size, so the target is deep and narrow and the draft has one
layer (before the shapes were fixed, median of 60 passes: 8 layers with intermediate size 640 9.0 ms
at 5 rows, 12 layers with 352 12.0 ms, a draft of one layer 1.4 ms, of two 2.2 ms).

## Examples
Greedy continuations of held-out function heads; the prompt ends where the docstring ends.

{examples}

## Licence and limits
The text is the Python standard library, under the PSF License Agreement
(https://docs.python.org/3/license.html); the weights and the prompts derived from it are given
under the same terms. The models have read a few million tokens: they know how Python looks, not
what a function should do. They loop on long outputs, and may reproduce passages of the library.
Trained on windows of at most 512 tokens; positions up to 1,024 are allowed but get worse.
"""


def render(report: dict, target: Llama, draft: Llama, size_bytes: int) -> str:
    """Return the card's text for `report`: the evaluation, `data`, `training` and `machine`."""
    costs = report["costs"]
    return CARD.format(
        shapes="\n".join([shape_row("target", TARGET, target), shape_row("draft", DRAFT, draft)]),
        size_mb=size_bytes / 1e6,
        data=report["data"],
        held_out=textwrap.fill(", ".join(f"`{name}`" for name in HELD_OUT_MODULES), 98),
        training="\n".join(f"- {line}" for line in report["training"]),
        lookahead=LOOKAHEAD,
        fresh_share=report["total"]["fresh_tokens"] / report["total"]["continued_tokens"],
        figures="\n".join(
            figure_row(name, row)
            for name, row in [*report["modules"].items(), ("**total**", report["total"])]
        ),
        machine=report["machine"],
        speedup=speedup(report["total"], costs),
        examples="\n\n".join(example(entry) for entry in report["completions"][::3][:6]),
        **costs,
    )


def shape_row(name: str, config: NetConfig, net: Llama) -> str:
    count = sum(weight.numel() for weight in net.parameters())
    return (
        f"| {name} | {count:,} | {config.num_layers} | {config.hidden_size} | "
        f"{config.num_heads} ({config.num_kv_heads}) x {config.head_dim} | "
        f"{config.intermediate_size} | {config.vocab_size:,} | {config.max_positions:,} |"
    )


def figure_row(name: str, row: dict) -> str:
    measured = row["acceptance"] is not None
    return (
        f"| {name} | {row['tokens']:,} | {row['nats_per_token']:.3f} | "
        f"{row['bits_per_byte']:.3f} | {row['prompts']} | "
        + (
            f"{row['acceptance']:.3f} | {row['fresh_acceptance']:.3f} | "
            f"{row['tokens_per_step']:.2f} |"
            if measured
            else "- | - | - |"
        )
    )


def example(entry: dict) -> str:
    return (
        f"From `{entry['module']}`:\n````python\n{entry['prompt']}\n"
        f"# ---- the model goes on ----{entry['completion'].rstrip()}\n````"
    )
