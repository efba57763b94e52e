"""The training loop of both models: a budget in time and steps, checkpoints, progress lines."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.demo_pair.batches import Streams
from tools.demo_pair.nets import Llama
from tools.demo_pair.optim import Optimizers
from tools.demo_pair.parallel import Workers

CHECKPOINT_EVERY_S = 150.0
REPORT_EVERY_STEPS = 20


@dataclass(frozen=True)
class TrainingBudget:
    """Training ends at `seconds` of training time or at `steps`, whichever comes first."""

    seconds: float
    steps: int | None = None

    def share(self, elapsed_s: float, step: int) -> float:
        by_steps = step / self.steps if self.steps else 0.0
        by_time = elapsed_s / self.seconds if self.seconds > 0 else 1.0
        return max(by_time, by_steps)


@dataclass
class TrainingState:
    """State of a checkpoint in addition to the weights and the optimizer."""

    layers: int
    step: int = 0
    warm_from_step: int = 0  # first step of the current warm-up
    elapsed_s: float = 0.0
    tokens: int = 0


class Training:
    """A net, its optimizers and its progress, restored from the checkpoint if it exists.

    A subclass builds the net (`build`) and runs one optimizer step at a share of the budget
    (`step`, which returns the figure to report). `figure` is its name.
    """

    label = "training"
    figure = "loss"
    matrix_lr = 0.015
    embedding_lr = 2e-3

    def __init__(self, checkpoint: Path, workers: Workers, layers: int) -> None:
        self.checkpoint, self.workers = checkpoint, workers
        self.progress = TrainingState(layers)
        state = None
        if checkpoint.exists():
            state = torch.load(checkpoint, map_location="cpu")
            self.progress = TrainingState(**state["progress"])
        self.adopt(self.build())
        if state is not None:
            self.net.load_state_dict(state["net"])
            self.optimizers.load_state_dict(state["optimizers"])
            self.progress.warm_from_step = state["progress"]["warm_from_step"]

    def build(self) -> Llama:
        raise NotImplementedError

    def step(self, share: float) -> float:
        raise NotImplementedError

    def adopt(self, net: Llama) -> None:
        """Replace the net; create optimizers for it, whose warm-up starts at this step."""
        self.net = net
        self.params = list(net.parameters())
        self.optimizers = Optimizers(net, self.matrix_lr, self.embedding_lr, self.workers)
        self.progress.warm_from_step = self.progress.step

    def save(self) -> None:
        """Write the checkpoint in one operation, so that a killed run leaves the previous one."""
        part = self.checkpoint.with_suffix(".part")
        torch.save(
            {
                "net": self.net.state_dict(),
                "optimizers": self.optimizers.state_dict(),
                "progress": dataclasses.asdict(self.progress),
            },
            part,
        )
        part.replace(self.checkpoint)

    def run(self, budget: TrainingBudget) -> None:
        """Step until the budget is used up, with a checkpoint every 150 s and at the end."""
        progress = self.progress
        saved_s, smooth = progress.elapsed_s, math.nan
        while (share := budget.share(progress.elapsed_s, progress.step)) < 1.0:
            start = time.perf_counter()
            value = self.step(share)
            smooth = value if math.isnan(smooth) else 0.95 * smooth + 0.05 * value
            progress.step += 1
            progress.elapsed_s += time.perf_counter() - start
            if progress.step % REPORT_EVERY_STEPS == 0:
                print(
                    f"{self.label} {share:6.1%} step {progress.step} {self.figure} {smooth:.3f} "
                    f"{progress.tokens:,} tokens {progress.elapsed_s:,.0f} s",
                    flush=True,
                )
            if progress.elapsed_s - saved_s > CHECKPOINT_EVERY_S:
                self.save()
                saved_s = progress.elapsed_s
        if progress.elapsed_s > saved_s:
            self.save()


class TextTraining(Training):
    """Next-token loss on windows of text."""

    def __init__(
        self,
        checkpoint: Path,
        streams: Streams,
        device: str,
        seed: int,
        workers: Workers,
        layers: int,
    ) -> None:
        torch.manual_seed(seed)
        self.streams, self.device, self.seed = streams, device, seed
        super().__init__(checkpoint, workers, layers)

    def losses(self, part: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.cross_entropy(self.net(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())
        return loss, loss
