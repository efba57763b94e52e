"""Distillation of the draft: agreement with the target where the draft will be asked.

Half of every batch is real text; half is text that the target itself continued from training
prompts, greedily or by sampling, because that is what a draft sees when it is served.
"""

from __future__ import annotations

import math
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from cbatch.demo.batches import Streams, draw, windows
from cbatch.demo.data import Corpus
from cbatch.demo.nets import DRAFT, Llama
from cbatch.demo.optim import Optimizers, wsd_scale
from cbatch.demo.prompts import function_heads
from cbatch.demo.sample import generate
from cbatch.demo.target import Budget, Progress, load_checkpoint, save_checkpoint

CONTEXT_TOKENS = 256
ROWS_PER_STEP = 16
PROMPT_TOKENS = 96
CONTINUED_TOKENS = CONTEXT_TOKENS + 1 - PROMPT_TOKENS
POOL_ROWS = 64
ARGMAX_WEIGHT = 0.5
CHECKPOINT_EVERY_S = 120.0


def pool_prompts(tokenizer: Tokenizer, streams: Streams, corpus: Corpus, seed: int, count: int
                 ) -> list[list[int]]:
    """Training prompts: half function heads, half windows of library text, at most 96 tokens."""
    heads = [h for d in corpus.train if not d.is_test for h in function_heads(d)]
    random.Random(seed).shuffle(heads)
    encoded = [e.ids[-PROMPT_TOKENS:] for e in tokenizer.encode_batch(heads[: count // 2])]
    generator = torch.Generator().manual_seed(seed)
    cuts = windows(streams.library, count - len(encoded), PROMPT_TOKENS, generator)
    return encoded + cuts.tolist()


def build_pool(target: Llama, prompts: list[list[int]], seconds: float, seed: int) -> Tensor:
    """Rows [n, context + 1] of a prompt and the target's continuation, made for `seconds`.

    Two batches in three are greedy, the third is sampled at temperature 0.8. A short prompt gets
    a longer continuation, so every row is full.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    batches = [order[i : i + POOL_ROWS] for i in range(0, len(order), POOL_ROWS)]
    random.Random(seed).shuffle(batches)
    rows: list[list[int]] = []
    start = time.perf_counter()
    for index, batch in enumerate(batches):
        chosen = [prompts[i] for i in batch]
        length = CONTEXT_TOKENS + 1 - min(len(prompt) for prompt in chosen)
        temperature = 0.8 if index % 3 == 2 else 0.0
        new = generate(target, chosen, length, temperature, seed + index)
        rows += [(p + n)[: CONTEXT_TOKENS + 1] for p, n in zip(chosen, new, strict=True)]
        elapsed_s = time.perf_counter() - start
        print(f"pool {len(rows)} rows {elapsed_s:,.0f} s", flush=True)
        if elapsed_s > seconds:
            break
    return torch.tensor(rows)


def init_draft(target: Llama) -> Llama:
    """A fresh draft whose embedding is the target's, projected on its leading directions."""
    draft = Llama(DRAFT).init_weights()
    embedding = target.model.embed_tokens.weight.detach()
    directions = torch.linalg.svd(embedding, full_matrices=False).Vh[: DRAFT.hidden_size]
    with torch.no_grad():
        draft.model.embed_tokens.weight.copy_(embedding @ directions.T)
    return draft


def distillation_loss(draft_logits: Tensor, target_logits: Tensor) -> tuple[Tensor, Tensor]:
    """KL(target, draft) mixed with cross-entropy to the target's argmax; and the agreement."""
    log_draft = F.log_softmax(draft_logits, dim=-1)
    choice = target_logits.argmax(-1)
    divergence = F.kl_div(log_draft, F.log_softmax(target_logits, dim=-1), reduction="none",
                          log_target=True).sum(-1).mean()
    greedy = F.nll_loss(log_draft.flatten(0, 1), choice.flatten())
    agreement = (draft_logits.argmax(-1) == choice).float().mean()
    return (1 - ARGMAX_WEIGHT) * divergence + ARGMAX_WEIGHT * greedy, agreement


def train_draft(work: Path, target: Llama, pool: Tensor, streams: Streams, budget: Budget,
                seed: int, start_from: Llama | None = None) -> tuple[Llama, Progress]:
    """Distil, or go on from `work/draft.pt`; `start_from` is an earlier draft to improve."""
    torch.manual_seed(seed)
    device = target.model.embed_tokens.weight.device
    draft = (start_from or init_draft(target.cpu())).to(device)
    target.to(device).eval()
    optimizers = Optimizers(draft, matrix_lr=0.02, embedding_lr=4e-3)
    checkpoint = work / "draft.pt"
    progress = Progress()
    if checkpoint.exists():
        progress = load_checkpoint(checkpoint, draft, optimizers)
    saved_s, smooth = progress.elapsed_s, math.nan
    while (share := budget.progress(progress.elapsed_s, progress.step)) < 1.0:
        start = time.perf_counter()
        generator = torch.Generator().manual_seed(seed * 7_000_003 + progress.step)
        picked = torch.randint(0, len(pool), (ROWS_PER_STEP // 2,), generator=generator)
        real = draw(streams, progress.step, seed + 1, ROWS_PER_STEP // 2, CONTEXT_TOKENS + 1, False)
        batch = torch.cat((real, pool[picked]))[:, :-1].to(device)
        with torch.no_grad():
            wanted = target(batch)
        loss, agreement = distillation_loss(draft(batch), wanted)
        loss.backward()
        optimizers.step(wsd_scale(share, progress.step, decay_share=0.4))
        value = agreement.item()
        smooth = value if math.isnan(smooth) else 0.95 * smooth + 0.05 * value
        progress.step += 1
        progress.tokens += batch.numel()
        progress.elapsed_s += time.perf_counter() - start
        if progress.step % 20 == 0:
            print(f"draft {share:6.1%} step {progress.step} loss {loss.item():.3f} agreement "
                  f"{smooth:.3f} {progress.elapsed_s:,.0f} s", flush=True)
        if progress.elapsed_s - saved_s > CHECKPOINT_EVERY_S:
            save_checkpoint(checkpoint, draft, optimizers, progress)
            saved_s = progress.elapsed_s
    save_checkpoint(checkpoint, draft, optimizers, progress)
    return draft, progress
