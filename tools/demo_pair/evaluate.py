"""Held-out figures of the pair: loss, greedy acceptance and cost ratio, per held-out module."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from tools.demo_pair.data import Document
from tools.demo_pair.nets import Llama, PaddedKVCache
from tools.demo_pair.prompts import function_heads
from tools.demo_pair.sample import cut_at, generate
from tools.demo_pair.tokenizer import END_OF_TEXT

WINDOW_TOKENS = 512
STRIDE_TOKENS = 256
HEADS_PER_MODULE = 12
CONTINUED_TOKENS = 96  # per prompt
LOOKAHEAD = 4  # drafts per step
REPEAT_TOKENS = 4  # length of a run that counts as repeated
TIMED_CONTEXT = 128  # tokens
TIMED_REPEATS = 200


@dataclass
class HeldOut:
    """Figures of held-out text: its loss, and greedy continuations of its function heads."""

    nats: float = 0.0
    tokens: int = 0
    num_bytes: int = 0
    hits: list[list[bool]] = field(default_factory=list)  # per prompt, see `agreements`
    fresh: list[bool] = field(default_factory=list)  # see `fresh_hits`

    def add(self, other: HeldOut) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def figures(self) -> dict[str, float | None]:
        """Return the figures: loss over all tokens, acceptance over greedy continuations."""
        count = sum(map(len, self.hits))
        return {
            "tokens": self.tokens,
            "nats_per_token": self.nats / self.tokens,
            "bits_per_byte": self.nats / math.log(2) / self.num_bytes,
            "prompts": len(self.hits),
            "continued_tokens": count,
            "acceptance": sum(map(sum, self.hits)) / count if count else None,
            "tokens_per_step": tokens_per_step(self.hits, LOOKAHEAD) if count else None,
            "fresh_tokens": len(self.fresh),
            "fresh_acceptance": sum(self.fresh) / len(self.fresh) if self.fresh else None,
        }


@torch.inference_mode()
def total_nats(net: Llama, ids: list[int]) -> float:
    """Return the summed next-token loss. Windows overlap, so most tokens follow 256 others."""
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
    """Return for each prompt whether the draft's argmax equals each token of the target's greedy
    continuation; and the continuations.

    The draft reads the target's tokens, as in verification. Tokens after the end token do not
    count.
    """
    hits: list[list[bool]] = []
    continuations: list[list[int]] = []
    device = draft.model.embed_tokens.weight.device
    for first in range(0, len(prompts), 16):
        chosen = prompts[first : first + 16]
        for prompt, new in zip(chosen, generate(target, chosen, CONTINUED_TOKENS), strict=True):
            count = min(len(cut_at(new, end)) + 1, len(new))
            row = torch.tensor([prompt + new[: count - 1]], device=device)
            draft_choices = draft(row)[0, len(prompt) - 1 :].argmax(-1).tolist()
            hits.append([a == b for a, b in zip(draft_choices, new[:count], strict=True)])
            continuations.append(new[:count])
    return hits, continuations


def tokens_per_step(rows: list[list[bool]], lookahead: int) -> float:
    """Return the mean tokens that a verification step commits if every step drafts `lookahead`."""
    steps = tokens = 0
    for row in rows:
        at = 0
        while at + lookahead < len(row):
            run = row[at : at + lookahead]
            accepted = run.index(False) if False in run else lookahead
            steps, tokens, at = steps + 1, tokens + accepted + 1, at + accepted + 1
    return tokens / steps if steps else float(bool(rows))


def fresh_hits(rows: list[list[bool]], continuations: list[list[int]]) -> list[bool]:
    """Return the hits at tokens that do not complete a repeated run of four in their continuation.

    A small target soon repeats itself when it decodes greedily, and a repetition is easy to draft.
    """
    fresh = []
    for row, tokens in zip(rows, continuations, strict=True):
        seen: set[tuple[int, ...]] = set()
        for index, hit in enumerate(row):
            run = tuple(tokens[max(0, index - REPEAT_TOKENS + 1) : index + 1])
            if run not in seen:
                fresh.append(hit)
            if len(run) == REPEAT_TOKENS:
                seen.add(run)
    return fresh


@torch.inference_mode()
def measure_costs(target: Llama, draft: Llama) -> dict[str, float]:
    """Return step times in fp32 on this CPU, batch 1, and c, the ratio of a draft step to a
    verification step.

    The four measurements alternate, and the shortest of each counts: other work on the machine can
    only add time.
    """
    nets = {f"target_{rows}_ms": (target.cpu(), rows) for rows in (1, LOOKAHEAD + 1, 8)}
    nets["draft_1_ms"] = draft.cpu(), 1
    caches = {}
    for name, (net, _) in nets.items():
        caches[name] = PaddedKVCache(
            net.config, torch.zeros(1, dtype=torch.long), TIMED_CONTEXT + 8
        )
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
    """Return all held-out figures as plain data: `modules`, `total`, `costs` and `completions`."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    by_module: dict[str, list[Document]] = defaultdict(list)
    for document in held_out:
        by_module[document.module.split(".")[0]].append(document)
    modules: dict[str, dict[str, float | None]] = {}
    completions: list[dict[str, object]] = []
    total = HeldOut()
    for module, documents in sorted(by_module.items()):
        figures, examples = _evaluate_module(target, draft, tokenizer, documents, end)
        modules[module] = figures.figures()
        total.add(figures)
        completions += [{"module": module, **entry} for entry in examples]
        loss, acceptance = (modules[module][name] for name in ("nats_per_token", "acceptance"))
        print(f"{module:12} loss {loss:.3f} acceptance {acceptance}", flush=True)
    return {
        "modules": modules,
        "total": total.figures(),
        "costs": measure_costs(target, draft),
        "completions": completions,
    }


def _evaluate_module(
    target: Llama, draft: Llama, tokenizer: Tokenizer, documents: list[Document], end: int
) -> tuple[HeldOut, list[dict[str, object]]]:
    """Return the figures of a module, and two of its continuations as examples."""
    figures = HeldOut()
    for document in documents:
        ids = [end, *tokenizer.encode(document.text).ids]
        figures.nats += total_nats(target, ids)
        figures.tokens += len(ids) - 1
        figures.num_bytes += len(document.text.encode())
    heads = [head for document in documents for head in function_heads(document)]
    heads = heads[:: max(1, len(heads) // HEADS_PER_MODULE)][:HEADS_PER_MODULE]
    if not heads:
        return figures, []
    figures.hits, new = agreements(target, draft, [tokenizer.encode(h).ids for h in heads], end)
    figures.fresh = fresh_hits(figures.hits, new)
    examples: list[dict[str, object]] = [
        {"prompt": head, "completion": tokenizer.decode(ids)}
        for head, ids in list(zip(heads, new, strict=True))[:2]
    ]
    return figures, examples


def speedup(total: dict[str, float], costs: dict[str, float]) -> float:
    """Return the speedup over plain decoding: tokens per step / the step's relative cost."""
    verify = costs[f"target_{LOOKAHEAD + 1}_ms"]
    step = verify + LOOKAHEAD * costs["draft_1_ms"]
    return total["tokens_per_step"] * costs["target_1_ms"] / step


def folder_bytes(*folders: Path) -> int:
    return sum(file.stat().st_size for folder in folders for file in folder.iterdir())
