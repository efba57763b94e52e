"""Held-out figures of the pair: loss, greedy acceptance and cost ratio, per held-out module."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from cbatch.demo.data import Document
from cbatch.demo.nets import KVCache, Llama
from cbatch.demo.prompts import function_heads
from cbatch.demo.sample import cut_at, generate
from cbatch.demo.tokenizer import END_OF_TEXT

WINDOW_TOKENS = 512
STRIDE_TOKENS = 256
HEADS_PER_MODULE = 12
CONTINUED_TOKENS = 96
LOOKAHEAD = 4
REPEAT_TOKENS = 4
TIMED_CONTEXT = 128
TIMED_REPEATS = 200


@dataclass
class ModuleFigures:
    """One held-out module. Loss is over all its tokens, acceptance over greedy continuations."""

    tokens: int
    nats_per_token: float
    bits_per_byte: float
    prompts: int = 0
    continued_tokens: int = 0
    acceptance: float | None = None
    tokens_per_step: float | None = None
    fresh_tokens: int = 0
    fresh_acceptance: float | None = None


@torch.inference_mode()
def total_nats(net: Llama, ids: list[int]) -> float:
    """Summed next-token loss; windows overlap so that a token sees at least 256 before it."""
    stream = torch.tensor(ids, device=net.model.embed_tokens.weight.device)
    nats, scored = 0.0, 1
    for start in range(0, max(len(ids) - STRIDE_TOKENS, 1), STRIDE_TOKENS):
        window = stream[start : start + WINDOW_TOKENS]
        losses = F.cross_entropy(net(window[None, :-1])[0], window[1:], reduction="none")
        nats += losses[scored - start - 1 :].sum().item()
        scored = start + len(window)
    return nats


@torch.inference_mode()
def agreements(
    target: Llama, draft: Llama, prompts: list[list[int]], end: int
) -> tuple[list[list[bool]], list[list[int]]]:
    """Per prompt: whether the draft names each token of the target's greedy continuation.

    The draft is teacher-forced along the target's tokens, which is what verification compares.
    Tokens after the end token are not counted.
    """
    hits: list[list[bool]] = []
    kept: list[list[int]] = []
    device = draft.model.embed_tokens.weight.device
    for first in range(0, len(prompts), 16):
        chosen = prompts[first : first + 16]
        for prompt, new in zip(chosen, generate(target, chosen, CONTINUED_TOKENS), strict=True):
            count = min(len(cut_at(new, end)) + 1, len(new))
            row = torch.tensor([prompt + new[: count - 1]], device=device)
            named = draft(row)[0, len(prompt) - 1 :].argmax(-1).tolist()
            hits.append([a == b for a, b in zip(named, new[:count], strict=True)])
            kept.append(new[:count])
    return hits, kept


def tokens_per_step(rows: list[list[bool]], lookahead: int) -> float:
    """Mean tokens a verification step commits when every step drafts `lookahead` tokens."""
    steps = tokens = 0
    for row in rows:
        at = 0
        while at + lookahead < len(row):
            run = row[at : at + lookahead]
            accepted = run.index(False) if False in run else lookahead
            steps, tokens, at = steps + 1, tokens + accepted + 1, at + accepted + 1
    return tokens / steps if steps else float(bool(rows))


def fresh_hits(rows: list[list[bool]], continuations: list[list[int]]) -> list[bool]:
    """The hits at tokens that do not complete a repeated run of four in their continuation.

    A small target soon repeats itself when it decodes greedily, and a repetition is easy to draft.
    """
    kept = []
    for row, tokens in zip(rows, continuations, strict=True):
        seen: set[tuple[int, ...]] = set()
        for index, hit in enumerate(row):
            run = tuple(tokens[max(0, index - REPEAT_TOKENS + 1) : index + 1])
            if run not in seen:
                kept.append(hit)
            if len(run) == REPEAT_TOKENS:
                seen.add(run)
    return kept


@torch.inference_mode()
def measure_costs(target: Llama, draft: Llama) -> dict[str, float]:
    """Step times in fp32 on this CPU, batch 1, and the ratio c of a draft to a verification step.

    The four measurements take turns and the best of each counts: other work on the machine only
    ever adds time.
    """
    nets = {f"target_{rows}_ms": (target.cpu(), rows) for rows in (1, LOOKAHEAD + 1, 8)}
    nets["draft_1_ms"] = draft.cpu(), 1
    caches = {}
    for name, (net, _) in nets.items():
        caches[name] = KVCache(net.config, torch.zeros(1, dtype=torch.long), TIMED_CONTEXT + 8)
        net(torch.zeros(1, TIMED_CONTEXT, dtype=torch.long), caches[name])
    costs = dict.fromkeys(nets, math.inf)
    for _ in range(TIMED_REPEATS):
        for name, (net, rows) in nets.items():
            caches[name].length = TIMED_CONTEXT
            start = time.perf_counter()
            net(torch.zeros(1, rows, dtype=torch.long), caches[name]).argmax(-1).tolist()
            costs[name] = min(costs[name], (time.perf_counter() - start) * 1e3)
    costs["c"] = costs["draft_1_ms"] / costs[f"target_{LOOKAHEAD + 1}_ms"]
    return costs


def evaluate(
    target: Llama, draft: Llama, tokenizer: Tokenizer, held_out: list[Document]
) -> dict[str, object]:
    """All held-out figures as plain data: `modules`, `total`, `costs` and `completions`."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    by_module: dict[str, list[Document]] = defaultdict(list)
    for document in held_out:
        by_module[document.module.split(".")[0]].append(document)
    modules: dict[str, ModuleFigures] = {}
    completions: list[dict[str, object]] = []
    all_rows: list[list[bool]] = []
    all_fresh: list[bool] = []
    nats = num_bytes = 0.0
    for module, documents in sorted(by_module.items()):
        figures, rows, fresh, shown, module_nats, size = _evaluate_module(
            target, draft, tokenizer, documents, end
        )
        modules[module] = figures
        all_rows += rows
        all_fresh += fresh
        completions += [{"module": module, **entry} for entry in shown]
        nats, num_bytes = nats + module_nats, num_bytes + size
        print(
            f"{module:12} loss {figures.nats_per_token:.3f} acceptance {figures.acceptance}",
            flush=True,
        )
    count = sum(len(row) for row in all_rows)
    scored = sum(figures.tokens for figures in modules.values())
    total = ModuleFigures(
        tokens=scored,
        nats_per_token=nats / scored,
        bits_per_byte=nats / math.log(2) / num_bytes,
        prompts=len(all_rows),
        continued_tokens=count,
        acceptance=sum(map(sum, all_rows)) / count,
        tokens_per_step=tokens_per_step(all_rows, LOOKAHEAD),
        fresh_tokens=len(all_fresh),
        fresh_acceptance=sum(all_fresh) / len(all_fresh),
    )
    return {
        "modules": {name: asdict(figures) for name, figures in modules.items()},
        "total": asdict(total),
        "costs": measure_costs(target, draft),
        "completions": completions,
    }


def _evaluate_module(
    target: Llama, draft: Llama, tokenizer: Tokenizer, documents: list[Document], end: int
) -> tuple[ModuleFigures, list[list[bool]], list[bool], list[dict[str, object]], float, int]:
    nats, tokens, size = 0.0, 0, 0
    for document in documents:
        ids = [end, *tokenizer.encode(document.text).ids]
        nats += total_nats(target, ids)
        tokens += len(ids) - 1
        size += len(document.text.encode())
    figures = ModuleFigures(tokens, nats / tokens, nats / math.log(2) / size)
    heads = [head for document in documents for head in function_heads(document)]
    heads = heads[:: max(1, len(heads) // HEADS_PER_MODULE)][:HEADS_PER_MODULE]
    if not heads:
        return figures, [], [], [], nats, size
    rows, new = agreements(target, draft, [tokenizer.encode(h).ids for h in heads], end)
    figures.prompts, figures.continued_tokens = len(heads), sum(map(len, rows))
    figures.acceptance = sum(map(sum, rows)) / figures.continued_tokens
    figures.tokens_per_step = tokens_per_step(rows, LOOKAHEAD)
    fresh = fresh_hits(rows, new)
    figures.fresh_tokens, figures.fresh_acceptance = len(fresh), sum(fresh) / len(fresh)
    shown: list[dict[str, object]] = [
        {"prompt": head, "completion": tokenizer.decode(ids)}
        for head, ids in list(zip(heads, new, strict=True))[:2]
    ]
    return figures, rows, fresh, shown, nats, size


def speedup(total: dict[str, float], costs: dict[str, float]) -> float:
    """Expected gain over plain decoding: tokens a step, over its cost in plain target steps."""
    verify = costs[f"target_{LOOKAHEAD + 1}_ms"]
    step = verify + LOOKAHEAD * costs["draft_1_ms"]
    return total["tokens_per_step"] * costs["target_1_ms"] / step


def folder_bytes(*folders: Path) -> int:
    return sum(file.stat().st_size for folder in folders for file in folder.iterdir())
