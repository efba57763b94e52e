"""Faults that the audit finds, planted; and a kernel without any."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.gpu_proofs.audit import UnsoundLaunch, auditing


@triton.jit
def neighbour_kernel(memory_ptr, BLOCK: tl.constexpr, REACH: tl.constexpr):
    """Store a block, and read the one `REACH` blocks before it."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = tl.load(memory_ptr + at - REACH * BLOCK, mask=at >= REACH * BLOCK, other=1.0)
    tl.store(memory_ptr + at, before + 1.0)


@triton.jit
def sum_kernel(parts_ptr, arrived_ptr, out_ptr, SEM: tl.constexpr):
    """Sum up all stored values in the last program."""
    me, count = tl.program_id(0), tl.num_programs(0)
    tl.store(parts_ptr + me, me + 1)
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr, 1, sem=SEM) == count - 1:
        total = 0
        for i in range(count):
            total += tl.load(parts_ptr + i)
        tl.store(out_ptr, total)


def words() -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=torch.int32) for size in (4, 1, 1)]


def test_faults_are_found() -> None:
    with auditing() as launches:
        neighbour_kernel[(4,)](torch.zeros(64), 16, 0)
        memory = words()
        sum_kernel[(4,)](*memory, "acq_rel")
        assert memory[2].item() == 10 and launches.total() == 2
        with pytest.raises(UnsoundLaunch, match="a program reads what another writes"):
            sum_kernel[(4,)](*words(), "relaxed")
        with pytest.raises(UnsoundLaunch, match="a program reads what another writes"):
            neighbour_kernel[(4,)](torch.zeros(64), 16, 1)
        with pytest.raises(UnsoundLaunch, match="outside of what was passed"):
            neighbour_kernel[(4,)](torch.zeros(64)[:60], 16, 0)
