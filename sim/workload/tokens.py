"""Stateless noise: the random draw for a token is a hash of its request and position."""

from __future__ import annotations

from typing import Any

_MASK = 2**64 - 1
ACCEPT = 1  # purpose of the noise that decides on drafts


def mix(state: Any, value: Any) -> Any:
    """Return one round of splitmix64 (Steele et al. 2014), for integers or uint64 arrays."""
    z = (state ^ value) + 0x9E3779B97F4A7C15 & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)
