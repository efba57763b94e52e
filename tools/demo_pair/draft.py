"""Distillation of the draft: it learns to agree with the target on the text that it will draft.

The draft first learns from text alone, which needs no target. Then it is distilled. A quarter of
the rows is real text; the others were continued by the target from training prompts, greedily or by
sampling, because a served draft sees such text.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.demo_pair.batches import Streams, draw
from tools.demo_pair.lessons import CONTEXT_TOKENS, Lessons
from tools.demo_pair.loop import TextTraining, Training
from tools.demo_pair.nets import DRAFT, Llama
from tools.demo_pair.optim import wsd_scale
from tools.demo_pair.parallel import Workers

ROWS_PER_STEP = 8
TEXT_ROWS_PER_STEP = 4
MICROBATCH_ROWS = 2  # if there are several worker threads
ARGMAX_WEIGHT = 0.5  # weight of the cross-entropy to the target's argmax
DECAY_SHARE = 0.4  # last share of the budget, in which the learning rate falls


def distillation_loss(
    draft_logits: Tensor, top_ids: Tensor, top_logits: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a mix of the cross-entropy to the target's likeliest tokens and to its argmax.

    The first is KL(target, draft) up to a constant, with the target cut to its top tokens. Also
    return the share of positions at which target and draft have the same argmax.
    """
    log_draft = F.log_softmax(draft_logits, dim=-1)
    top_probs = torch.softmax(top_logits.float(), dim=-1)
    top_ids = top_ids.long()
    soft = -(top_probs * log_draft.gather(-1, top_ids)).sum(-1).mean()
    choice = top_ids[..., 0]
    greedy = F.nll_loss(log_draft.flatten(0, -2), choice.flatten())
    agreement = (draft_logits.argmax(-1) == choice).float().mean()
    return (1 - ARGMAX_WEIGHT) * soft + ARGMAX_WEIGHT * greedy, agreement


def project_embedding(embedding: Tensor, size: int) -> Tensor:
    """Return a trained embedding [vocab, size], projected on its `size` leading directions."""
    directions = torch.linalg.svd(embedding, full_matrices=False).Vh[:size]
    return embedding @ directions.T


class Pretraining(TextTraining):
    """Training on real text: cheap, and possible before the target is finished.

    The embedding, most of a draft's weights, starts as a projection of the target's if a checkpoint
    of the target exists.
    """

    label = "draft (text)"
    matrix_lr = 0.02
    embedding_lr = 3e-3

    def __init__(
        self, work: Path, streams: Streams, device: str, seed: int, workers: Workers
    ) -> None:
        self.target_file = work / "target.pt"
        file = work / "draft_text.pt"
        super().__init__(file, streams, device, seed, workers, DRAFT.num_layers)

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
        rows = TEXT_ROWS_PER_STEP
        batch = draw(self.streams, at, self.seed + 1, rows, CONTEXT_TOKENS + 1, False)
        micro_rows = MICROBATCH_ROWS if self.workers.count > 1 else rows
        loss, _ = self.workers.backward(self.losses, batch.to(self.device), self.params, micro_rows)
        # No learning rate decay: distillation continues from here.
        self.optimizers.step(wsd_scale(0.0, at - self.progress.warm_from_step))
        self.progress.tokens += rows * CONTEXT_TOKENS
        return loss


class Distillation(Training):
    """Training on lessons; it continues from `start_from`, the draft trained on text."""

    label = "draft"
    figure = "agreement"
    matrix_lr = 0.02
    embedding_lr = 3e-3

    def __init__(
        self, work: Path, lessons: Lessons, seed: int, workers: Workers, start_from: Llama
    ) -> None:
        self.lessons, self.start_from, self.seed = lessons, start_from, seed
        super().__init__(work / "draft.pt", workers, DRAFT.num_layers)

    def build(self) -> Llama:
        return self.start_from

    def step(self, share: float) -> float:
        at = self.progress.step
        generator = torch.Generator().manual_seed(self.seed * 7_000_003 + at)
        picked = torch.randint(0, len(self.lessons.ids), (ROWS_PER_STEP,), generator=generator)
        micro_rows = MICROBATCH_ROWS if self.workers.count > 1 else ROWS_PER_STEP
        _, agreement = self.workers.backward(self.losses, picked, self.params, micro_rows)
        warm_step = at - self.progress.warm_from_step
        self.optimizers.step(wsd_scale(share, warm_step, decay_share=DECAY_SHARE))
        self.progress.tokens += ROWS_PER_STEP * CONTEXT_TOKENS
        return agreement

    def losses(self, picked: Tensor) -> tuple[Tensor, Tensor]:
        device = self.net.cos.device
        ids = self.lessons.ids[picked].long().to(device)
        return distillation_loss(
            self.net(ids[:, :-1]),
            self.lessons.top_ids[picked].to(device),
            self.lessons.top_logits[picked].to(device),
        )
