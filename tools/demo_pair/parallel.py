"""Data parallelism over threads: each thread runs whole microbatches on one core.

If an operator is split over the cores, each operator waits for the slowest core. On a machine with
other work this was 3 times slower than threads that take microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

In = TypeVar("In")
Out = TypeVar("Out")


class Workers:
    """Threads that share the parameters; `count` is the number of cores to use (1 on a GPU)."""

    def __init__(self, count: int) -> None:
        torch.set_num_threads(1)
        self.count = count
        self._pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))

    def map(self, function: Callable[[In], Out], items: Iterable[In]) -> list[Out]:
        """Apply `function` to every item. Return the results in the order of the items."""
        return list(self._pool.map(function, items))

    def backward(
        self,
        losses: Callable[[Tensor], tuple[Tensor, Tensor]],
        batch: Tensor,
        params: Sequence[Tensor],
        rows: int,
    ) -> tuple[float, float]:
        """Set `.grad` to the mean gradient over `batch`, cut into microbatches of `rows`.

        `losses` returns (loss, statistic), each a mean over its microbatch. Their means over the
        batch are returned. Sums have the order of the microbatches, so timing does not matter.
        """

        def run(part: Tensor) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
            share = len(part) / len(batch)
            loss, statistic = losses(part)
            gradients = torch.autograd.grad(loss * share, params)
            return loss.detach() * share, statistic.detach() * share, gradients

        total, statistics = 0.0, 0.0
        for loss, statistic, gradients in self._pool.map(run, batch.split(rows)):
            total, statistics = total + loss.item(), statistics + statistic.item()
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = gradient if param.grad is None else param.grad.add_(gradient)
        return total, statistics
