"""The loop that trains a head: a budget, checkpoints, progress lines, acceptance by depth."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.demo_pair.optim import Muon, wsd_scale
from tools.demo_pair.parallel import Workers
from tools.heads.batches import LessonBatch, batch_of, batches
from tools.heads.lessons import Lesson
from tools.heads.target_parts import TargetParts

DEPTH_WEIGHT = 0.8  # weight of a draft in the loss, relative to the draft before it
SHARP = 1.3  # factor on the target's logits: temperature 0.77, between greedy and usual sampling
BATCH_TOKENS = 1024  # including padding
REPORT_EVERY_S, SAVE_EVERY_S = 15.0, 60.0
MATRIX_LR, OTHER_LR = 0.02, 3e-3
SLOW = 0.05  # factor of the learning rate for the weights that a net lists in `slow`
DECAY_SHARE = 0.5  # last share of the budget, in which the learning rate falls
WARMUP_STEPS = 10


@dataclass
class Acceptance:
    """Acceptance on held-out tokens: `by_depth[j]` is the rate for drafts number j + 1, given that
    the drafts before it were accepted."""

    by_depth: list[float]
    trials: int

    @property
    def tokens_per_step(self) -> float:
        """Return the expected tokens per step with all depths drafted, including the bonus
        token."""
        tokens, survival = 1.0, 1.0
        for rate in self.by_depth:
            survival *= rate
            tokens += survival
        return tokens


class HeadTraining:
    """Training of a net with the interface of `EagleNet` and `MedusaNet`: `carried`, `logits`,
    `draft`, `draft_ids`, `rows`, `in_turn` and `slow`. A step takes one batch for each torch
    thread."""

    def __init__(
        self,
        net: Any,
        parts: TargetParts,
        checkpoint: Path,
        *,
        steps: int,
        least_depth: int = 1,
        seed: int = 0,
    ) -> None:
        self.net, self.parts, self.checkpoint = net, parts, checkpoint
        self.steps, self.least_depth, self.seed = steps, least_depth, seed
        self.step, self.tokens, self.elapsed_s, self.loss = 0, 0, 0.0, 0.0
        named = [(name, p) for name, p in net.named_parameters() if p.ndim == 2]
        slow = [p for name, p in named if name.endswith(net.slow)]
        fast = [p for name, p in named if not name.endswith(net.slow)]
        matrices = [{"params": p, "share": by} for p, by in ((fast, 1.0), (slow, SLOW)) if p]
        others = [{"params": [p for p in net.parameters() if p.ndim != 2], "share": 1.0}]
        self.workers = Workers(torch.get_num_threads())
        half = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
        dtype = torch.bfloat16 if half else torch.float32
        self.muon = Muon(matrices, MATRIX_LR, self.workers, weight_decay=0.01, dtype=dtype)
        self.adam = torch.optim.AdamW(others, OTHER_LR, betas=(0.9, 0.95), weight_decay=0.0)
        self._number = torch.full((parts.config.vocab_size,), -1)
        self._number[net.draft_ids] = torch.arange(len(net.draft_ids))
        if checkpoint.exists():
            self._load()

    def run(
        self, lessons: Sequence[Lesson], *, seconds: float, max_steps: int | None = None
    ) -> None:
        """Train until the budget is used up; time before a restart counts."""
        reported_s = saved = self.elapsed_s
        epoch = 0
        while True:
            groups = list(batches(lessons, BATCH_TOKENS, self.seed + self.step + epoch))
            for first in range(0, len(groups), self.workers.count):
                by_steps = self.step / max_steps if max_steps else 0.0
                share = max(self.elapsed_s / seconds, by_steps)
                if share >= 1:
                    self.save()
                    return
                began = time.perf_counter()
                self._learn(groups[first : first + self.workers.count], share)
                self.elapsed_s += time.perf_counter() - began
                if self.elapsed_s - reported_s > REPORT_EVERY_S:
                    reported_s = self.elapsed_s
                    print(self.progress(share), flush=True)
                if self.elapsed_s - saved > SAVE_EVERY_S:
                    saved = self.elapsed_s
                    self.save()
            epoch += 1

    def progress(self, share: float) -> str:
        return (
            f"{share:6.1%} step {self.step} loss {self.loss:.3f} {self.tokens:,} tokens "
            f"{self.elapsed_s:,.0f} s"
        )

    def depth_at(self, share: float) -> int:
        """Return how many drafts to learn at this share of the budget, starting from `least_depth`.
        Later drafts matter once earlier ones are accepted, and all cost the same. A net whose
        drafts do not depend on each other learns all at once."""
        if not self.net.in_turn:
            return self.steps
        return min(self.steps, max(self.least_depth, 1 + int(share * self.steps)))

    def _learn(self, groups: Sequence[Sequence[Lesson]], share: float) -> None:
        depth = self.depth_at(share)
        counts = [
            sum(len(lesson.tokens) - lesson.num_given for lesson in group) for group in groups
        ]
        params, loss = list(self.net.parameters()), 0.0

        def learn(at: int) -> tuple[float, tuple[Tensor, ...]]:
            part = self._loss(batch_of(groups[at]), depth) * counts[at] / sum(counts)
            return float(part.detach()), torch.autograd.grad(part, params, allow_unused=True)

        for part, gradients in self.workers.map(learn, range(len(groups))):
            loss += part
            for param, gradient in zip(params, gradients, strict=True):
                new = torch.zeros_like(param) if gradient is None else gradient
                param.grad = new if param.grad is None else param.grad.add_(new)
        nn.utils.clip_grad_norm_(params, 1.0)
        scale = wsd_scale(share, self.step, WARMUP_STEPS, DECAY_SHARE)
        for optimizer, rate in ((self.muon, MATRIX_LR), (self.adam, OTHER_LR)):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale * group["share"]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.loss = loss if not self.step else 0.95 * self.loss + 0.05 * loss
        self.step += 1
        self.tokens += sum(counts)

    def _loss(self, batch: LessonBatch, depth: int) -> Tensor:
        """Return the cross-entropy to the target's sharpened distribution over the draft ids: a
        mean over tokens, then a weighted mean over `depth` drafts."""
        with torch.autocast("cpu", torch.bfloat16):
            carried = self.net.carried(batch.tokens, batch.states, depth)
            target_rows = self._pairs(batch, 0)[1]  # includes the rows of later drafts
            with torch.no_grad():
                states = batch.states[:, :, -1].flatten(0, 1)[target_rows]
                logits = F.linear(self.parts.normed(states), self.net.rows)
                target_probs = (logits.float() * SHARP).softmax(-1)
            loss, weight = torch.zeros((), requires_grad=True), 0.0
            for j, carry in enumerate(carried):
                rows, target_row = self._pairs(batch, j)
                if not len(rows):
                    continue
                draft_logprobs = self.net.logits(carry.flatten(0, 1)[rows]).float().log_softmax(-1)
                depth_weight = DEPTH_WEIGHT**j
                loss = (
                    loss
                    - depth_weight
                    * (target_probs[torch.searchsorted(target_rows, target_row)] * draft_logprobs)
                    .sum(-1)
                    .mean()
                )
                weight += depth_weight
        return loss / max(weight, 1e-9)

    def _pairs(self, batch: LessonBatch, j: int) -> tuple[Tensor, Tensor]:
        """Return flat rows t at which draft j is for a token that counts; and rows t + 1 + j, at
        which the target predicts the same token."""
        length = batch.states.shape[1]
        last = batch.tokens.shape[1] - 2 - j
        if last <= 0:
            return torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long)
        counts = batch.counts[:, 2 + j :] & (self._number[batch.tokens[:, 2 + j :]] >= 0)
        row, t = counts.nonzero(as_tuple=True)
        return row * length + t, row * length + t + 1 + j

    # ---- evaluation ---------------------------------------------------------------------------

    @torch.no_grad()
    def acceptance(self, lessons: Sequence[Lesson]) -> Acceptance:
        """Return the acceptance, with the target's likeliest tokens as the reference."""
        hits, trials = torch.zeros(2, self.steps, dtype=torch.long)
        for group in batches(lessons, BATCH_TOKENS, 0):
            batch = batch_of(group)
            draft_logits = self.net.draft(batch.tokens, batch.states, self.steps)
            normed = self.parts.normed(batch.states[:, :, -1]).bfloat16()
            likeliest = F.linear(normed, self.parts.head).argmax(-1)
            accepted = torch.ones_like(batch.counts[:, :-1])
            for j, logits in enumerate(draft_logits):
                last = batch.tokens.shape[1] - 2 - j
                if last <= 0:
                    break
                drafts = self.net.draft_ids[logits[:, :last].argmax(-1)]
                hit = drafts == likeliest[:, 1 + j : 1 + j + last]
                tried = accepted[:, :last] & batch.counts[:, 2 + j :]
                trials[j] += tried.sum()
                hits[j] += (tried & hit).sum()
                # Later drafts count only where the text has the drafted token.
                accepted = accepted[:, :last] & hit & (drafts == batch.tokens[:, 2 + j :])
        rates = (hits / trials.clamp(min=1)).tolist()
        return Acceptance(rates, int(trials[0]))

    # ---- checkpoints --------------------------------------------------------------------------

    def save(self) -> None:
        """Write the checkpoint in one operation."""
        part = self.checkpoint.with_suffix(".part")
        torch.save(
            {
                "net": self.net.state_dict(),
                "muon": self.muon.state_dict(),
                "adam": self.adam.state_dict(),
                "draft_ids": self.net.draft_ids,
                "at": [self.step, self.tokens, self.elapsed_s, self.loss],
            },
            part,
        )
        part.replace(self.checkpoint)

    def _load(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.net.load_state_dict(state["net"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.step, self.tokens, self.elapsed_s, self.loss = state["at"]
