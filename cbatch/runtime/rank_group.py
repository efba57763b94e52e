"""The ranks of one model: sums and concatenation of their partial results."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

# Longer than any wait: a lost rank closes its connection; a hanging rank is ended from outside.
_TIMEOUT = timedelta(days=1)


class RankGroup:
    """This process among the `size` ranks of one machine, connected by gloo. All ranks must make
    the same calls in the same order, with tensors of the same shapes. If a rank is lost, a call
    raises RuntimeError.
    """

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        """Wait for the other ranks. All use the same `folder`, which has no other files."""
        self.rank, self.size = rank, size
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = _TIMEOUT
        store = dist.FileStore(str(folder / "ranks"), size)
        # Not the default group of the process, which the application may use.
        self._group = dist.ProcessGroupGloo(store, rank, size, options)

    def all_gather(self, mine: Tensor) -> Tensor:
        """Return the tensors of all ranks, in their order: [size, *shape]."""
        gathered = mine.new_empty(self.size, *mine.shape)
        if mine.numel():
            self._group.allgather([list(gathered)], [mine.contiguous()]).wait()
        return gathered

    def sum(self, mine: Tensor) -> Tensor:
        """Return the sum over ranks, fp32, added in rank order. So the bits of a row are the same
        on every rank, and do not depend on other rows."""
        gathered = self.all_gather(mine)
        total = gathered[0] + gathered[1]
        for rank in range(2, self.size):
            total += gathered[rank]
        return total

    def columns(self, mine: Tensor, count: int) -> Tensor:
        """Concatenate [rows, n] of each rank; return the first columns: [rows, count]."""
        gathered = self.all_gather(mine).transpose(0, 1).flatten(1)
        return gathered[:, :count].contiguous()


def join(rank: int, size: int, folder: Path) -> RankGroup:
    """Join the ranks. Raises RuntimeError if this torch has no gloo."""
    if not dist.is_available() or not dist.is_gloo_available():
        raise RuntimeError("tensor_parallel_size: this torch was built without gloo")
    with torch.inference_mode(False):
        return RankGroup(rank, size, folder)
