"""Training of the target: next-token loss on packed standard-library source."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from tools.demo_pair.batches import Streams, draw
from tools.demo_pair.loop import TextTraining
from tools.demo_pair.nets import TARGET, Llama, NetConfig
from tools.demo_pair.optim import wsd_scale
from tools.demo_pair.parallel import Workers

TOKENS_PER_STEP = 2048
MICROBATCH_TOKENS = 512
# (share of the budget, tokens of context from then on): attention over short windows is cheaper and
# loses little while the model learns short-range structure.
CONTEXTS = ((0.0, 128), (0.4, 256), (0.7, 512))
# Layers in the first half of the budget: steps are cheaper, and few tokens need no more depth.
SHALLOW_LAYERS = 4
GROW_AT_SHARE = 0.5
DECAY_SHARE = 0.3
WARMUP_STEPS = 40


def grow(net: Llama, config: NetConfig) -> Llama:
    """Return a deeper net that computes the same function.

    Each layer is followed by copies of itself with zero output projections, so a copy adds nothing
    before it has learned. `config.num_layers` is a multiple of the net's layers.
    """
    copies = config.num_layers // net.config.num_layers
    deeper = Llama(config)
    deeper.model.embed_tokens.load_state_dict(net.model.embed_tokens.state_dict())
    deeper.model.norm.load_state_dict(net.model.norm.state_dict())
    for index, layer in enumerate(deeper.model.layers):
        layer.load_state_dict(net.model.layers[index // copies].state_dict())
        if index % copies:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
            torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return deeper.to(net.model.embed_tokens.weight.device)


class TargetTraining(TextTraining):
    label = "target"

    def __init__(
        self, work: Path, streams: Streams, device: str, seed: int, workers: Workers
    ) -> None:
        super().__init__(work / "target.pt", streams, device, seed, workers, SHALLOW_LAYERS)

    def build(self) -> Llama:
        shape = dataclasses.replace(TARGET, num_layers=self.progress.layers)
        return Llama(shape).init_weights().to(self.device)

    def grow(self) -> None:
        """Continue with the full depth, unless the net has it already."""
        if self.progress.layers < TARGET.num_layers:
            self.adopt(grow(self.net, TARGET))
            self.progress.layers = TARGET.num_layers

    def step(self, share: float) -> float:
        if share >= GROW_AT_SHARE:
            self.grow()
        context = [length for start, length in CONTEXTS if share >= start][-1]
        rows = TOKENS_PER_STEP // context
        # Test code adds variety in the stable phase; the decay phase has library code only.
        with_tests = share < 1.0 - DECAY_SHARE
        at = self.progress.step
        batch = draw(self.streams, at, self.seed, rows, context + 1, with_tests).to(self.device)
        micro_rows = max(1, MICROBATCH_TOKENS // context) if self.workers.count > 1 else rows
        loss, _ = self.workers.backward(self.losses, batch, self.params, micro_rows)
        warm_step = at - self.progress.warm_from_step
        self.optimizers.step(wsd_scale(share, warm_step, WARMUP_STEPS, DECAY_SHARE))
        self.progress.tokens += TOKENS_PER_STEP
        return loss
