"""Muon for matrices and AdamW for the other weights, in fp32.

`torch.optim.Muon` orthogonalises one matrix at a time in bf16, which is slow on a CPU without bf16
instructions. Here matrices of equal shape are stacked into one batched product.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tools.demo_pair.parallel import Workers

# Quintic Newton-Schulz coefficients, Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon)
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STACKED_MATRICES = 12  # most matrices per batched product


def orthogonalise(gradients: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of [n, rows, cols] matrices towards one."""
    a, b, c = COEFFICIENTS
    x = gradients if gradients.shape[1] <= gradients.shape[2] else gradients.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if gradients.shape[1] <= gradients.shape[2] else x.mT


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised per matrix in `dtype`, with decoupled weight decay."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        workers: Workers,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._workers, self._dtype = workers, dtype
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for weight in group["params"]:
                by_shape.setdefault(weight.shape, []).append(weight)
            stacks = [
                weights[i : i + STACKED_MATRICES]
                for weights in by_shape.values()
                for i in range(0, len(weights), STACKED_MATRICES)
            ]
            self._workers.map(lambda weights, group=group: self._update(weights, group), stacks)

    @torch.no_grad()
    def _update(self, weights: list[Tensor], group: dict[str, float]) -> None:
        gradients = torch.stack([self._nesterov(w, group) for w in weights])
        updates = orthogonalise(gradients.to(self._dtype)).to(gradients.dtype)
        rows, columns = weights[0].shape
        scale = group["lr"] * max(1.0, rows / columns) ** 0.5
        for weight, update in zip(weights, updates, strict=True):
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.add_(update, alpha=-scale)

    def _nesterov(self, weight: Tensor, group: dict[str, float]) -> Tensor:
        assert weight.grad is not None
        state = self.state[weight]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(weight)
        state["momentum"].lerp_(weight.grad, 1 - group["momentum"])
        return weight.grad.lerp(state["momentum"], group["momentum"])


class Optimizers:
    """Both optimizers with one schedule: `step(scale)` scales both learning rates."""

    def __init__(
        self, net: nn.Module, matrix_lr: float, embedding_lr: float, workers: Workers
    ) -> None:
        named = list(net.named_parameters())
        matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n]
        others = [p for n, p in named if p.ndim != 2 or "embed" in n]
        self.muon = Muon(matrices, matrix_lr, workers)
        self.adam = torch.optim.AdamW(others, embedding_lr, betas=(0.9, 0.95), weight_decay=0.0)
        self._base = (matrix_lr, embedding_lr)

    def step(self, scale: float) -> None:
        for optimizer, base in zip((self.muon, self.adam), self._base, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, object]:
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, dict[str, object]]) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])


def wsd_scale(
    progress: float, step: int, warmup_steps: int = 40, decay_share: float = 0.25
) -> float:
    """Return the factor on learning rates: warm-up, 1, linear decay over the last `decay_share`."""
    warmup = min(1.0, (step + 1) / warmup_steps)
    decay = min(1.0, max(0.0, 1.0 - progress) / decay_share)
    return warmup * decay
