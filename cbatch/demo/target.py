"""Training of the target: next-token loss on packed standard-library source."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from cbatch.demo.batches import Streams, draw
from cbatch.demo.nets import TARGET, Llama
from cbatch.demo.optim import Optimizers, wsd_scale

TOKENS_PER_STEP = 4096
CONTEXT_TOKENS = 512
# Half windows cost a fifth less and lose little while the model learns short-range structure.
SHORT_CONTEXT_TOKENS = 256
SHORT_CONTEXT_SHARE = 0.6
DECAY_SHARE = 0.25
CHECKPOINT_EVERY_S = 180.0


@dataclass(frozen=True)
class Budget:
    """Training ends at `seconds` of training time or at `steps`, whichever comes first."""

    seconds: float
    steps: int | None = None

    def progress(self, elapsed_s: float, step: int) -> float:
        by_steps = step / self.steps if self.steps else 0.0
        return max(elapsed_s / self.seconds, by_steps)


@dataclass
class Progress:
    """What a checkpoint restores beside the weights and the optimizer."""

    step: int = 0
    elapsed_s: float = 0.0
    tokens: int = 0


def save_checkpoint(path: Path, net: Llama, optimizers: Optimizers, progress: Progress) -> None:
    """Write whole or not at all: a killed run must find the last good checkpoint."""
    part = path.with_suffix(".part")
    torch.save(
        {"net": net.state_dict(), "optimizers": optimizers.state_dict(), "progress": progress},
        part,
    )
    part.replace(path)


def load_checkpoint(path: Path, net: Llama, optimizers: Optimizers) -> Progress:
    state = torch.load(path, weights_only=False, map_location="cpu")
    net.load_state_dict(state["net"])
    optimizers.load_state_dict(state["optimizers"])
    return state["progress"]


def train_target(work: Path, streams: Streams, budget: Budget, seed: int, device: str
                 ) -> tuple[Llama, Progress]:
    """Train, or go on from `work/target.pt`; returns the net and what it took."""
    torch.manual_seed(seed)
    net = Llama(TARGET).init_weights().to(device)
    optimizers = Optimizers(net, matrix_lr=0.02, embedding_lr=3e-3)
    checkpoint = work / "target.pt"
    progress = Progress()
    if checkpoint.exists():
        progress = load_checkpoint(checkpoint, net, optimizers)
    saved_s, smooth = progress.elapsed_s, math.nan
    while (share := budget.progress(progress.elapsed_s, progress.step)) < 1.0:
        start = time.perf_counter()
        context = SHORT_CONTEXT_TOKENS if share < SHORT_CONTEXT_SHARE else CONTEXT_TOKENS
        rows = TOKENS_PER_STEP // context
        # Test code widens the stable phase; the decay settles on library code alone.
        with_tests = share < 1.0 - DECAY_SHARE
        batch = draw(streams, progress.step, seed, rows, context + 1, with_tests).to(device)
        logits = net(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizers.step(wsd_scale(share, progress.step, decay_share=DECAY_SHARE))
        value = loss.item()
        smooth = value if math.isnan(smooth) else 0.95 * smooth + 0.05 * value
        progress.step += 1
        progress.tokens += TOKENS_PER_STEP
        progress.elapsed_s += time.perf_counter() - start
        if progress.step % 10 == 0:
            rate = TOKENS_PER_STEP / (time.perf_counter() - start)
            print(f"target {share:6.1%} step {progress.step} loss {smooth:.3f} "
                  f"{rate:,.0f} tokens/s {progress.elapsed_s:,.0f} s", flush=True)
        if progress.elapsed_s - saved_s > CHECKPOINT_EVERY_S:
            save_checkpoint(checkpoint, net, optimizers, progress)
            saved_s = progress.elapsed_s
    save_checkpoint(checkpoint, net, optimizers, progress)
    return net, progress
