"""Each kind of fault that the audit finds, planted; and a kernel without any."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.gpu_proofs.interpreted.audit import Audit, UnsoundLaunch


@triton.jit
def copy_kernel(source_ptr, target_ptr, count, BLOCK: tl.constexpr, REACH: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(source_ptr + at, mask=at < count + REACH, other=0)
    tl.store(target_ptr + at, x, mask=at < count + REACH)


@triton.jit
def neighbour_kernel(memory_ptr, BLOCK: tl.constexpr):
    """Store a block, and read the one before it."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = tl.load(memory_ptr + at - BLOCK, mask=at >= BLOCK, other=1.0)
    tl.store(memory_ptr + at, before + 1.0)


@triton.jit
def last_kernel(out_ptr):
    tl.store(out_ptr, tl.program_id(0))


@triton.jit
def own_kernel(memory_ptr, out_ptr, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    """Store a block, and read it in reverse."""
    at = tl.arange(0, BLOCK)
    tl.store(memory_ptr + at, at)
    if BARRIER:
        tl.debug_barrier()
    tl.store(out_ptr + at, tl.load(memory_ptr + BLOCK - 1 - at))


@triton.jit
def lanes_kernel(out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK) // 2, tl.arange(0, BLOCK))


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


def test_sound_kernels_pass() -> None:
    with Audit().auditing() as audit:
        source, target = torch.arange(30), torch.empty(30, dtype=torch.int64)
        copy_kernel[(2,)](source, target, 30, 16, 0)
        copy_kernel[(2,)](target, torch.empty_like(target), 30, 16, 0)
        out = torch.empty(16, dtype=torch.int32)
        own_kernel[(1,)](torch.empty_like(out), out, 16, BARRIER=True)
    assert target.tolist() == source.tolist()
    assert out.tolist() == list(range(15, -1, -1))
    assert audit.launches == {"copy_kernel": 2, "own_kernel": 1}
    assert audit.programs == 5 and audit.loads == 76


def test_an_address_beyond_a_tensor_is_caught() -> None:
    source = torch.zeros(64)
    with (
        Audit().auditing(),
        pytest.raises(UnsoundLaunch, match="outside of what was passed is read"),
    ):
        copy_kernel[(2,)](source[:30], torch.zeros(64), 30, 16, 1)
    with (
        Audit().auditing(),
        pytest.raises(UnsoundLaunch, match="outside of what was passed is written"),
    ):
        copy_kernel[(2,)](torch.zeros(64), source[:30], 30, 16, 1)


def test_a_read_of_unwritten_memory_is_caught() -> None:
    with Audit().auditing():
        source = torch.empty(32)
        copy_kernel[(1,)](torch.zeros(16), source, 16, 16, 0)
        copy_kernel[(1,)](source, torch.empty(32), 16, 16, 0)
        with pytest.raises(UnsoundLaunch, match="reads memory that was never written"):
            copy_kernel[(2,)](source, torch.empty(32), 17, 16, 0)
        source.zero_()
        copy_kernel[(2,)](source, torch.empty(32), 17, 16, 0)


def test_programs_that_read_what_others_write_are_caught() -> None:
    with (
        Audit().auditing(),
        pytest.raises(UnsoundLaunch, match="a program reads what another writes"),
    ):
        neighbour_kernel[(4,)](torch.zeros(64), 16)


def test_programs_that_write_to_one_place_are_caught() -> None:
    with (
        Audit().auditing(),
        pytest.raises(UnsoundLaunch, match="a program writes what another writes"),
    ):
        last_kernel[(2,)](torch.zeros(1, dtype=torch.int32))


def test_an_order_that_changes_bits_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.gpu_proofs.interpreted.accesses import Accesses

    monkeypatch.setattr(Accesses, "faults", lambda self: [])
    with (
        Audit().auditing(),
        pytest.raises(UnsoundLaunch, match="programs reversed leave other bits"),
    ):
        last_kernel[(2,)](torch.zeros(1, dtype=torch.int32))
    with Audit(["shuffled"]).auditing(), pytest.raises(UnsoundLaunch, match="programs shuffled"):
        neighbour_kernel[(8,)](torch.zeros(128), 16)


def test_a_program_that_reads_what_it_stored_needs_a_barrier() -> None:
    memory = torch.zeros(16, dtype=torch.int32)
    with Audit().auditing(), pytest.raises(UnsoundLaunch, match="without a barrier"):
        own_kernel[(1,)](memory, torch.zeros_like(memory), 16, BARRIER=False)


def test_lanes_that_differ_on_a_place_are_caught() -> None:
    with Audit().auditing(), pytest.raises(UnsoundLaunch, match="lanes of one store differ"):
        lanes_kernel[(1,)](torch.zeros(16, dtype=torch.int32), 16)


def test_an_atomic_orders_programs_only_if_it_says_so() -> None:
    def words() -> list[torch.Tensor]:
        return [torch.zeros(size, dtype=torch.int32) for size in (4, 1, 1)]

    with Audit().auditing():
        memory = words()
        sum_kernel[(4,)](*memory, "acq_rel")
        assert memory[2].item() == 10
        with pytest.raises(UnsoundLaunch, match="a program reads what another writes"):
            sum_kernel[(4,)](*words(), "relaxed")
