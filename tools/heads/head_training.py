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
# Factor on the target's logits: temperature 0.77, between greedy and usual sampling.
SHARPENING = 1.3
BATCH_TOKENS = 1024  # including padding
REPORT_EVERY_S, SAVE_EVERY_S = 15.0, 60.0
MATRIX_LR, OTHER_LR = 0.02, 3e-3
SLOW_FACTOR = 0.05  # of the learning rate, for the `slow_weights` of a net
DECAY_SHARE = 0.5  # the learning rate falls in this last share of the budget
WARMUP_STEPS = 10


@dataclass
class Acceptance:
    """Acceptance on held-out tokens: `by_depth[j]` is the rate of draft j, counted from 0, given
    that the drafts before it were accepted."""

    by_depth: list[float]
    trials: int

    @property
    def tokens_per_step(self) -> float:
        """Return the expected tokens of a step that drafts to all depths, bonus token included."""
        tokens, survival = 1.0, 1.0
        for rate in self.by_depth:
            survival *= rate
            tokens += survival
        return tokens


class HeadTraining:
    """Training of a net: an `EagleNet`, a `MedusaNet`, or another net with their attributes. A step
    takes one batch for each torch thread."""

    def __init__(
        self,
        net: Any,
        parts: TargetParts,
        checkpoint: Path,
        *,
        steps: int,
        first_depth: int = 1,
        seed: int = 0,
    ) -> None:
        self.net, self.parts, self.checkpoint = net, parts, checkpoint
        self.steps, self.first_depth, self.seed = steps, first_depth, seed
        self.step, self.tokens, self.elapsed_s, self.loss = 0, 0, 0.0, 0.0
        named = [(name, p) for name, p in net.named_parameters() if p.ndim == 2]
        slow = [p for name, p in named if name.endswith(net.slow_weights)]
        fast = [p for name, p in named if not name.endswith(net.slow_weights)]
        factors = (fast, 1.0), (slow, SLOW_FACTOR)
        matrices = [{"params": p, "share": factor} for p, factor in factors if p]
        others = [{"params": [p for p in net.parameters() if p.ndim != 2], "share": 1.0}]
        self.workers = Workers(torch.get_num_threads())
        has_bf16 = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
        dtype = torch.bfloat16 if has_bf16 else torch.float32
        self.muon = Muon(matrices, MATRIX_LR, self.workers, weight_decay=0.01, dtype=dtype)
        self.adam = torch.optim.AdamW(others, OTHER_LR, betas=(0.9, 0.95), weight_decay=0.0)
        # By token id: its index in `draft_ids`; -1 for an id that the net cannot draft.
        self._draft_index = torch.full((parts.config.vocab_size,), -1)
        self._draft_index[net.draft_ids] = torch.arange(len(net.draft_ids))
        if checkpoint.exists():
            self._load()

    def run(
        self, lessons: Sequence[Lesson], *, seconds: float, max_steps: int | None = None
    ) -> None:
        """Train until the budget is used up. The budget includes time before a restart."""
        reported_s = saved_s = self.elapsed_s
        epoch = 0
        while True:
            groups = list(batches(lessons, BATCH_TOKENS, self.seed + self.step + epoch))
            for first in range(0, len(groups), self.workers.count):
                step_share = self.step / max_steps if max_steps else 0.0
                share = max(self.elapsed_s / seconds, step_share)
                if share >= 1:
                    self.save()
                    return
                started_s = time.perf_counter()
                self._train_step(groups[first : first + self.workers.count], share)
                self.elapsed_s += time.perf_counter() - started_s
                if self.elapsed_s - reported_s > REPORT_EVERY_S:
                    reported_s = self.elapsed_s
                    print(self.progress(share), flush=True)
                if self.elapsed_s - saved_s > SAVE_EVERY_S:
                    saved_s = self.elapsed_s
                    self.save()
            epoch += 1

    def progress(self, share: float) -> str:
        return (
            f"{share:6.1%} step {self.step} loss {self.loss:.3f} {self.tokens:,} tokens "
            f"{self.elapsed_s:,.0f} s"
        )

    def depth_at(self, share: float) -> int:
        """Return the number of drafts to train at this share of the budget, from `first_depth` on.
        Later drafts are useful only once earlier drafts are accepted, and each costs the same time.
        A net whose drafts do not depend on each other trains all of them from the start."""
        if not self.net.is_sequential:
            return self.steps
        return min(self.steps, max(self.first_depth, 1 + int(share * self.steps)))

    def _train_step(self, groups: Sequence[Sequence[Lesson]], share: float) -> None:
        depth = self.depth_at(share)
        num_tokens = [
            sum(len(lesson.tokens) - lesson.num_given for lesson in group) for group in groups
        ]
        total_tokens, params, loss = sum(num_tokens), list(self.net.parameters()), 0.0

        def gradients_of(index: int) -> tuple[float, tuple[Tensor, ...]]:
            group_loss = self._loss(batch_of(groups[index]), depth)
            part = group_loss * num_tokens[index] / total_tokens
            return float(part.detach()), torch.autograd.grad(part, params, allow_unused=True)

        for part, gradients in self.workers.map(gradients_of, range(len(groups))):
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
        self.tokens += total_tokens

    def _loss(self, batch: LessonBatch, depth: int) -> Tensor:
        """Return the cross-entropy of the net's distribution relative to the target's sharpened
        distribution, both over the draft ids: the mean over positions, then the weighted mean over
        drafts 0 to `depth` - 1."""
        with torch.autocast("cpu", torch.bfloat16):
            output_states = self.net.output_states(batch.tokens, batch.states, depth)
            # Ascending; they include the target positions of all later drafts.
            target_positions = self._positions(batch, 0)[1]
            with torch.no_grad():
                states = batch.states[:, :, -1].flatten(0, 1)[target_positions]
                logits = F.linear(self.parts.normed(states), self.net.head_rows)
                target_probs = (logits.float() * SHARPENING).softmax(-1)
            loss, total_weight = torch.zeros((), requires_grad=True), 0.0
            for j, state in enumerate(output_states):
                positions, targets = self._positions(batch, j)
                if not len(positions):
                    continue
                draft_logits = self.net.logits(state.flatten(0, 1)[positions])
                probs = target_probs[torch.searchsorted(target_positions, targets)]
                cross_entropy = -(probs * draft_logits.float().log_softmax(-1)).sum(-1).mean()
                loss = loss + DEPTH_WEIGHT**j * cross_entropy
                total_weight += DEPTH_WEIGHT**j
        return loss / max(total_weight, 1e-9)

    def _positions(self, batch: LessonBatch, j: int) -> tuple[Tensor, Tensor]:
        """Return the positions t at which draft j is trained, and t + 1 + j, at which the target
        predicts the same token, number t + 2 + j; both flat over the batch. The token must be one
        of `batch.to_predict` that the net can draft."""
        length = batch.states.shape[1]
        num_positions = batch.tokens.shape[1] - 2 - j
        if num_positions <= 0:
            return torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long)
        can_draft = self._draft_index[batch.tokens[:, 2 + j :]] >= 0
        row, t = (batch.to_predict[:, 2 + j :] & can_draft).nonzero(as_tuple=True)
        return row * length + t, row * length + t + 1 + j

    # ---- evaluation ---------------------------------------------------------------------------

    @torch.no_grad()
    def acceptance(self, lessons: Sequence[Lesson]) -> Acceptance:
        """Return the acceptance of drafts by a greedy target: a draft is accepted if it is the
        target's most likely token."""
        hits, trials = torch.zeros(2, self.steps, dtype=torch.long)
        for group in batches(lessons, BATCH_TOKENS, 0):
            batch = batch_of(group)
            draft_logits = self.net.draft(batch.tokens, batch.states, self.steps)
            normed = self.parts.normed(batch.states[:, :, -1]).bfloat16()
            likeliest = F.linear(normed, self.parts.head).argmax(-1)
            accepted = torch.ones_like(batch.to_predict[:, :-1])
            for j, logits in enumerate(draft_logits):
                count = batch.tokens.shape[1] - 2 - j
                if count <= 0:
                    break
                drafts = self.net.draft_ids[logits[:, :count].argmax(-1)]
                hit = drafts == likeliest[:, 1 + j : 1 + j + count]
                tried = accepted[:, :count] & batch.to_predict[:, 2 + j :]
                trials[j] += tried.sum()
                hits[j] += (tried & hit).sum()
                # The net reads the text's tokens, so a later draft is valid only if the text has
                # the drafted token here.
                accepted = accepted[:, :count] & hit & (drafts == batch.tokens[:, 2 + j :])
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
