"""The step shapes for which work is captured. Whatever a step brings is padded to the next one, and
rows of memory to whole pieces of 16."""

from __future__ import annotations

_SMALL = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_LARGE_STEP = 128
_ROUND_TO = 16
# Beyond it a step keeps the device busy for longer than it takes to queue it.
MOST_CAPTURED_TOKENS = _SMALL[-1]


def bucket(count: int, most: int) -> int:
    """The least bucket that holds `count`, at most `most`; 0 for none."""
    if count <= 0:
        return 0
    if count > MOST_CAPTURED_TOKENS:
        return min(-(-count // _LARGE_STEP) * _LARGE_STEP, most)
    return min(next(b for b in _SMALL if b >= count), most)


def aligned(count: int) -> int:
    """Elements of a row, so that the next one begins where loads may be wide: kernels are compiled
    for that, and for one kind of rows alone."""
    return -(-count // _ROUND_TO) * _ROUND_TO


def ladder(most: int) -> list[int]:
    """Every captured bucket of counts up to `most`, the largest first: what they need memory for
    is then there for the others."""
    found = {bucket(count, most) for count in (*_SMALL, most) if count <= most}
    return sorted((b for b in found if b <= MOST_CAPTURED_TOKENS), reverse=True)
