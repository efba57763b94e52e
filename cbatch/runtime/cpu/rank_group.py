"""Ranks that compute a model together: what they add up, and what they put side by side."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

# Nobody waits so long: who lost a rank is told by its connection, who hangs is ended from outside.
_TIMEOUT = timedelta(days=1)


class RankGroup:
    """This process among `size` of one machine, joined by gloo. Every rank makes the same calls in
    the same order, with tensors of the same shapes. Where one is gone, a call raises RuntimeError.
    """

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        """Waits for the others, which name the same folder; nothing else is in it."""
        self.rank, self.size = rank, size
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = _TIMEOUT
        store = dist.FileStore(str(folder / "ranks"), size)
        # Not the default group of the process: that is its owner's.
        self._group = dist.ProcessGroupGloo(store, rank, size, options)

    def all_gather(self, mine: Tensor) -> Tensor:
        """[size, *shape]: what each rank brought, in the order of ranks."""
        every = mine.new_empty(self.size, *mine.shape)
        if mine.numel():
            self._group.allgather([list(every)], [mine.contiguous()]).wait()
        return every

    def sum(self, mine: Tensor) -> Tensor:
        """Of what each rank brought, fp32, added in the order of ranks: a row's bits are its own,
        and the same on every rank."""
        every = self.all_gather(mine)
        total = every[0] + every[1]
        for rank in range(2, self.size):
            total += every[rank]
        return total

    def columns(self, mine: Tensor, count: int) -> Tensor:
        """[rows, count] of [rows, some] of each rank, side by side; what is beyond is dropped."""
        every = self.all_gather(mine).transpose(0, 1).flatten(1)
        return every[:, :count].contiguous()


def join(rank: int, size: int, folder: Path) -> RankGroup:
    """Raises RuntimeError where this torch has no gloo."""
    if not dist.is_available() or not dist.is_gloo_available():
        raise RuntimeError("tensor_parallel: this torch was built without gloo")
    with torch.inference_mode(False):
        return RankGroup(rank, size, folder)
