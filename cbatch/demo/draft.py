"""Distillation of the draft: agreement with the target where the draft will be asked.

The draft first learns from text alone, which needs no target. Then it is distilled: three rows of
eight are real text, the others text that the target itself continued from training prompts,
greedily or by sampling, because that is what a draft sees when it is served.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from cbatch.demo.batches import Streams, draw, windows
from cbatch.demo.data import Corpus
from cbatch.demo.loop import Budget, Progress, Training
from cbatch.demo.nets import DRAFT, Llama
from cbatch.demo.optim import wsd_scale
from cbatch.demo.parallel import Workers
from cbatch.demo.prompts import function_heads
from cbatch.demo.sample import generate

CONTEXT_TOKENS = 256
MICROBATCH_ROWS = 2
PROMPT_TOKENS = 96
POOL_ROWS = 64
ARGMAX_WEIGHT = 0.5
REAL_SHARE = 0.375
DECAY_SHARE = 0.4


def pool_prompts(tokenizer: Tokenizer, streams: Streams, corpus: Corpus, seed: int, count: int
                 ) -> list[list[int]]:
    """Training prompts: half function heads, half windows of library text, at most 96 tokens."""
    heads = [h for d in corpus.train if not d.is_test for h in function_heads(d)]
    random.Random(seed).shuffle(heads)
    encoded = [e.ids[-PROMPT_TOKENS:] for e in tokenizer.encode_batch(heads[: count // 2])]
    generator = torch.Generator().manual_seed(seed)
    cuts = windows(streams.library, count - len(encoded), PROMPT_TOKENS, generator)
    return encoded + cuts.tolist()


def build_pool(target: Llama, prompts: list[list[int]], seconds: float, seed: int,
               workers: Workers) -> Tensor:
    """Rows [n, context + 1] of a prompt and the target's continuation, made for `seconds`.

    Two batches in three are greedy, the third is sampled at temperature 0.8. A short prompt gets
    a longer continuation, so every row is full.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    batches = [order[i : i + POOL_ROWS] for i in range(0, len(order), POOL_ROWS)]
    random.Random(seed).shuffle(batches)
    deadline = time.perf_counter() + seconds

    def continue_batch(index: int) -> list[list[int]]:
        if index >= workers.count and time.perf_counter() > deadline:
            return []
        chosen = [prompts[i] for i in batches[index]]
        length = CONTEXT_TOKENS + 1 - min(len(prompt) for prompt in chosen)
        temperature = 0.8 if index % 3 == 2 else 0.0
        new = generate(target, chosen, length, temperature, seed + index)
        print(f"pool batch {index} of {len(batches)}", flush=True)
        return [(p + n)[: CONTEXT_TOKENS + 1] for p, n in zip(chosen, new, strict=True)]

    made = workers.map(continue_batch, range(len(batches)))
    return torch.tensor([row for rows in made for row in rows])


def distillation_loss(draft_logits: Tensor, target_logits: Tensor) -> tuple[Tensor, Tensor]:
    """KL(target, draft) mixed with cross-entropy to the target's argmax; and the agreement."""
    log_draft = F.log_softmax(draft_logits, dim=-1)
    choice = target_logits.argmax(-1)
    divergence = F.kl_div(log_draft, F.log_softmax(target_logits, dim=-1), reduction="none",
                          log_target=True).sum(-1).mean()
    greedy = F.nll_loss(log_draft.flatten(0, 1), choice.flatten())
    agreement = (draft_logits.argmax(-1) == choice).float().mean()
    return (1 - ARGMAX_WEIGHT) * divergence + ARGMAX_WEIGHT * greedy, agreement


def project_embedding(embedding: Tensor, size: int) -> Tensor:
    """The rows of a trained embedding along its `size` leading directions."""
    directions = torch.linalg.svd(embedding, full_matrices=False).Vh[:size]
    return embedding @ directions.T


class Pretraining(Training):
    """Next-token loss on real text: cheap, and needs no finished target.

    The embedding, most of a draft, starts as a projection of the target's if a checkpoint of the
    target is there.
    """

    label = "draft (text)"
    matrix_lr = 0.02
    embedding_lr = 3e-3
    rows_per_step = 4

    def __init__(self, work: Path, streams: Streams, device: str, seed: int, workers: Workers
                 ) -> None:
        torch.manual_seed(seed)
        self.streams, self.device, self.seed = streams, device, seed
        self.target_file = work / "target.pt"
        super().__init__(work / "draft_text.pt", workers, DRAFT.num_layers)

    def build(self) -> Llama:
        net = Llama(DRAFT).init_weights()
        if self.target_file.exists():
            embedding = torch.load(self.target_file)["net"]["model.embed_tokens.weight"]
            with torch.no_grad():
                net.model.embed_tokens.weight.copy_(
                    project_embedding(embedding.cpu(), DRAFT.hidden_size)
                )
        return net.to(self.device)

    def step(self, share: float) -> float:
        at = self.progress.step
        batch = draw(self.streams, at, self.seed + 1, self.rows_per_step, CONTEXT_TOKENS + 1, False)
        value = self.learn(batch.to(self.device))
        # No decay: distillation goes on from here.
        self.optimizers.step(wsd_scale(0.0, at - self.progress.warm_from_step))
        return value

    def learn(self, batch: Tensor) -> float:
        micro_rows = MICROBATCH_ROWS if self.workers.count > 1 else len(batch)
        _, value = self.workers.backward(self.losses, batch, self.params, micro_rows)
        self.progress.tokens += batch.numel() - len(batch)
        return value

    def losses(self, part: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.cross_entropy(self.net(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())
        return loss, loss


class Distillation(Pretraining):
    label = "draft"
    figure = "agreement"
    rows_per_step = 8

    def __init__(self, work: Path, target: Llama, pool: Tensor, streams: Streams, seed: int,
                 workers: Workers, start_from: Llama | None) -> None:
        self.target, self.pool, self.start_from = target.eval(), pool, start_from
        self.streams, self.device, self.seed = streams, target.cos.device, seed
        torch.manual_seed(seed)
        Training.__init__(self, work / "draft.pt", workers, DRAFT.num_layers)

    def build(self) -> Llama:
        return (self.start_from or Llama(DRAFT).init_weights()).to(self.device)

    def step(self, share: float) -> float:
        at = self.progress.step
        generator = torch.Generator().manual_seed(self.seed * 7_000_003 + at)
        num_real = int(self.rows_per_step * REAL_SHARE)
        count = (self.rows_per_step - num_real,)
        picked = torch.randint(0, len(self.pool), count, generator=generator)
        real = draw(self.streams, at, self.seed + 2, num_real, CONTEXT_TOKENS + 1, False)
        value = self.learn(torch.cat((real, self.pool[picked])).to(self.device))
        warm_step = at - self.progress.warm_from_step
        self.optimizers.step(wsd_scale(share, warm_step, decay_share=DECAY_SHARE))
        return value

    def losses(self, part: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = self.target(part[:, :-1])
        return distillation_loss(self.net(part[:, :-1]), wanted)


def pretrain_draft(work: Path, streams: Streams, budget: Budget, seed: int, device: str,
                   workers: Workers) -> tuple[Llama, Progress]:
    """Train on text, or go on from `work/draft_text.pt`."""
    training = Pretraining(work, streams, device, seed, workers)
    training.run(budget)
    return training.net, training.progress


def distil_draft(work: Path, target: Llama, pool: Tensor, streams: Streams, budget: Budget,
                 seed: int, workers: Workers, start_from: Llama | None
                 ) -> tuple[Llama, Progress]:
    """Distil, or go on from `work/draft.pt`; `start_from` is the draft trained on text."""
    training = Distillation(work, target, pool, streams, seed, workers, start_from)
    training.run(budget)
    return training.net, training.progress
