"""Bucket sizes for graph capture: a step's token and row counts are padded to the next bucket, and
rows of buffers to a multiple of 16 elements."""

from __future__ import annotations

SMALL = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_LARGE_STEP = 128
_ROUND_TO = 16
# Most tokens of a captured step. The device runs larger steps for longer than the host needs to
# queue them.
MOST_CAPTURED_TOKENS = SMALL[-1]


def bucket(count: int, largest: int) -> int:
    """Return the smallest bucket >= `count`, capped at `largest`; 0 for a count of 0."""
    if count <= 0:
        return 0
    if count > MOST_CAPTURED_TOKENS:
        return min(-(-count // _LARGE_STEP) * _LARGE_STEP, largest)
    return min(next(b for b in SMALL if b >= count), largest)


def aligned(count: int) -> int:
    """Return `count` rounded up to a multiple of 16, the row length of a buffer. Rows then start at
    aligned addresses, so kernels need only a variant with wide loads."""
    return -(-count // _ROUND_TO) * _ROUND_TO


def ladder(largest: int) -> list[int]:
    """Return every captured bucket for counts up to `largest`, in descending order, so that smaller
    graphs reuse the memory that the largest one allocated."""
    buckets = {bucket(count, largest) for count in (*SMALL, largest) if count <= largest}
    return sorted((b for b in buckets if b <= MOST_CAPTURED_TOKENS), reverse=True)
